"""`make measure`: time limits of the product, measured on a fresh copy of the tree."""
