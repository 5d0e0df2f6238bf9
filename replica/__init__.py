"""What both training scripts share; nothing here sends or receives."""


class JobError(Exception):
    """Bad input or a hopeless state: the message is the one line that a user needs."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


class UsageError(JobError):
    """What was asked for cannot be done: exit code 2."""

    def __init__(self, message: str):
        super().__init__(message, code=2)
