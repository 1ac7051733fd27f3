"""What is decided at the start of a fit: measured on the ranks themselves, chosen on one of them, followed by all."""
