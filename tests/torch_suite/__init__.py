"""What torch's own tests ask of AdamW, written anew for ``GrassAdamW`` with ``rank=None`` and with ``rank=0.5``."""
