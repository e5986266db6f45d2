"""What each of the five papers says of its parts, measured on the bundled model."""
