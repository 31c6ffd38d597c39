"""What a user gets who installs the wheel with one extra: sizes, import times, and documents that are recognised."""
