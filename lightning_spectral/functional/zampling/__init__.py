"""The mathematics of Zampling: weights as sparse random combinations of bits."""
