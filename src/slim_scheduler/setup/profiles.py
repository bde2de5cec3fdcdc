"""Device profiles as JSON files in `profiles/`. What a profile means is `core/profile.py`'s."""

from pathlib import Path

import msgspec

from slim_scheduler.core.errors import ProfileError
from slim_scheduler.core.profile import Profile
from slim_scheduler.setup.cache import write_whole


def read_profile(path: Path) -> Profile:
    """Reads a profile's JSON. Raises ProfileError naming the file and what is wrong."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
        profile.check()
        return profile
    except FileNotFoundError:
        raise ProfileError(f"profile {path} does not exist; write one with `slim measure`") from None
    except (msgspec.DecodeError, ProfileError) as error:
        raise ProfileError(f"profile {path}: {error}") from None


def write_profile(profile: Profile, path: Path) -> None:
    write_whole(path, msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def profile_name(device: str, precision: str, model: str) -> str:
    """The file of a device's profile in profiles/: `cpu-digits.json`, `openvino-bf16-digits.json`."""
    kind = device.partition(":")[0]
    return f"{kind}-{model}.json" if precision == "fp32" else f"{kind}-{precision}-{model}.json"
