"""Views and tensors as HTML, for Jupyter and whatever else shows notebooks. Drawing reads no tensor data.

Plain nested lists, `<details>` and inline CSS; nothing is fetched from anywhere. Where scripts run there is a search
box; where scripts and styles are taken out (GitHub) the lists still read.
"""

from .pages import shown, tensor_html, view_html
from .parts import Shown

__all__ = ["Shown", "shown", "tensor_html", "view_html"]
