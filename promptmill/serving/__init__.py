"""Running a model server: command (settings → argv), process (no orphans), gate (is it ours and able)."""
