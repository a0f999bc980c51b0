"""Models larger than the device: units of the model visit it one after another."""
