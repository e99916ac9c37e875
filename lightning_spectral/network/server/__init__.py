"""The server's side of a network: who is there, and an executor that trains clients on their own devices."""
