"""Load and fault injection on a real deployment: `holdfast chaos`."""
