"""What EAGLE-3 is: torch only, tensors in, tensors out."""
