"""Whole-number arithmetic that every device does bit for bit: transforms, sums of votes, orthogonalising."""
