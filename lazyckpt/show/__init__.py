"""What people see: text, HTML, what is drawn of a tensor. Nothing here reads tensor data unless it is asked for values."""
