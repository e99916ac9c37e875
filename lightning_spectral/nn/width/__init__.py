"""Networks cut by width: which channels belong together, and what is left of a module without some of them."""
