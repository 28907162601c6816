"""Where bytes come from: local folders and remote file systems, behind one interface."""
