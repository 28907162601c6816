"""The browser of a terminal (`lazyckpt browse`), with Textual: the tree of names, and of a tensor what it is, which
file holds which block, its values and a histogram.

What is drawn is made of plain data by functions (`levels`, `detail`, `fragments`, `bars`, `sheet`, `code`); `app` and
the widgets (`tree`, `grid`, `histogram`, `screens`) put it on the screen. Moving around reads no tensor data. What is
read, or may take long, is done by threads (`background`), so that the screen never waits. What a checkpoint brings is
printed literally.
"""
