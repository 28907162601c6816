"""What people see: text, HTML, what is drawn of a tensor. Tensor data is read only for values and samples of them."""
