"""A real deployment under load and under fire: `holdfast chaos`."""
