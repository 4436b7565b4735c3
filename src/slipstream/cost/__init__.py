"""What the hardware can do and what a step costs: arithmetic and detection, no model code."""
