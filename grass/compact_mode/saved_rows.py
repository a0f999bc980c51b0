"""``state_dict`` of a converted layer is the plain layer's: the weight holds the active rows, which are left out."""

from __future__ import annotations

from typing import Any

from grass.compact_mode.synced_rows import SyncedRows


class SavedRows(SyncedRows):
    """The part of :class:`grass.compact_mode.layer.CompactLayer` that is saved and loaded."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.settle()
        self.sync()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}active"]

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self.settle(loads=True)
        arguments = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(*arguments)
        if f"{prefix}active" in missing_keys:
            missing_keys.remove(f"{prefix}active")
        if self.rows().is_meta:
            raise RuntimeError(
                "A converted layer on the meta device has lost its active rows: load weights before grass.compact(), "
                "and with accelerate choose FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False)"
            )
        if not self.holds_active():  # otherwise active stays: it may be more precise than the weight
            self.reload()
        self.mark_synced()
