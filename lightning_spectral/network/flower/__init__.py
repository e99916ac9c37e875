"""Flower as the network: its SuperLink carries messages, its SuperNodes run devices."""
