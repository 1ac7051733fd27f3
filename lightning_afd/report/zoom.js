for (const box of document.querySelectorAll(".timeline")) {
  const buttons = box.previousElementSibling.querySelectorAll("button");
  const scroll = box.querySelector(".scroll");
  const stretch = (zoom) => {
    const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / scroll.scrollWidth;
    box.style.setProperty("--zoom", zoom);
    for (const step of [1, 2, 4, 8, 16, 32]) box.classList.toggle("upto" + step, step <= zoom);
    scroll.scrollLeft = middle * scroll.scrollWidth - scroll.clientWidth / 2;
    for (const button of buttons) button.classList.toggle("on", Number(button.dataset.zoom) === zoom);
  };
  for (const button of buttons) button.onclick = () => stretch(Number(button.dataset.zoom));
}
