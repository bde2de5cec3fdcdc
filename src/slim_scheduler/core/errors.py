"""The tree of exceptions.

`InputError` and below are the user's to fix: one line with the value, the limit and the next step; the command line
prints it and exits with 2. Overload, deadlines, lost servers and cancellations are outcomes (`types.Outcome`), never
exceptions.
"""

import re


class SlimError(Exception):
    """Base of all errors raised on purpose."""


class InputError(SlimError):
    """Something handed in cannot be used."""


class ConfigError(InputError):
    """A configuration file, override or command-line value."""


class CheckpointError(InputError):
    """A model or policy folder."""


class DataError(InputError):
    """Images, labels or an accuracy table."""


class ProfileError(InputError):
    """A device profile."""


class TraceError(InputError):
    """An arrival trace."""


class RecordError(InputError):
    """A run's folder or record."""


class RouterError(InputError):
    """A router gave no usable decision. The dispatcher falls back and counts it; a command refuses its run."""


class OutOfMemoryError(SlimError):
    """A device refused memory for a batch or an instance."""


class WorkerLostError(SlimError):
    """A process of a training or a comparison ended and did not say why: somebody or the memory limit killed it."""


class DeviceLostError(SlimError):
    """A device failed in a way that no later call of this process can get past: its server falls silent."""


NOISE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : (/\S+ )?")  # before what an error of it says


def first_line(error: Exception) -> str:
    """What another library's error says, as part of one line of ours."""
    lines = NOISE.sub("", str(error).strip()).splitlines()
    return next((line.strip() for line in lines if line.strip()), type(error).__name__)[:200]
