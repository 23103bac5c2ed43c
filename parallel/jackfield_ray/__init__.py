"""Launcher `ray`: workers on a Ray cluster, one a GPU or a share of a CPU, in placement groups (docs/launchers.md)."""
