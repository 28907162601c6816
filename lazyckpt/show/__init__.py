"""What people see: text now, HTML and plots later. Nothing here reads tensor data."""
