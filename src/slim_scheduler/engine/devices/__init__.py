"""What runs segments: the device protocol, and one file for each kind of device."""
