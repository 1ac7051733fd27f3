"""Lightning strategies that place attention and experts on separate workers."""

if __name__ == "strategies":
    # The folder lies at the top of a checkout, so that it can be imported by accident as a second, separate copy.
    raise ImportError("this folder is part of lightning_afd: import lightning_afd.strategies instead of strategies")
