"""Files that released versions wrote, and the test that this version opens them."""
