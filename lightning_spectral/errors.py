"""What the package warns about and raises by its own name, so that users can filter it and tests can demand it."""


class SpectralWarning(UserWarning):
    """A run goes on, but something a user would want to know happened: a client left out, a setting moved."""


class ClientError(RuntimeError):
    """Something failed while a client trained; the message names the round, the client and the stage."""


class RoundError(RuntimeError):
    """A round cannot be finished: no client returned an update that can be used."""
