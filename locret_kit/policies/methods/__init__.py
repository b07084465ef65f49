"""One file per method: its parts, its paper and its registration. The registry imports every module of this folder."""
