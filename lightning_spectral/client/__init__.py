"""All that a device needs to train what it was sent, without Lightning and without the server."""
