"""Views and tensors as HTML, for Jupyter and other notebook viewers. Rendering reads no tensor data.

The HTML consists of nested lists, `<details>` and inline CSS, and fetches nothing. A search box appears where scripts
run; the lists remain readable where scripts and styles are stripped (GitHub).
"""

from ...markup import Shown
from .pages import shown, tensor_html, view_html

__all__ = ["Shown", "shown", "tensor_html", "view_html"]
