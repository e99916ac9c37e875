"""Networks cut by width: which channels belong together, and what remains of a module without some of them."""
