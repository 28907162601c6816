"""The terminal browser (`lazyckpt browse`), built with Textual: a tree of names, and for each tensor its description, a
map of which file holds which block, its values and a histogram.

Functions of `tree`, `detail`, `fragments`, `grid` and `histogram` turn plain data into content; `app`, the widgets and
`screens` display it. Navigation reads no tensor data. Reading and slow work run on threads (`background`), so that the
screen never blocks. Text of a checkpoint is printed literally.
"""
