// Add a search box to every output that has none yet. A query without dots matches anywhere in a label. A query with
// dots matches the end of one label, then whole labels, then the beginning of one label on consecutive levels. "0-125"
// and "0-126/2" (every second) represent the numbers in the range.
for (const root of document.querySelectorAll(".lazyckpt:not([data-on])")) {
  root.dataset.on = "1";
  const tree = root.querySelector(".tree:not(.side)");
  if (!tree || tree.querySelectorAll("li").length < 4) continue;
  const input = document.createElement("input");
  input.type = "search";
  input.placeholder = "search names, e.g. layers.0.mlp";
  input.setAttribute("aria-label", "search names");
  input.dataset.lmSuppressShortcuts = "true";
  const note = document.createElement("div");
  note.className = "note";
  note.hidden = true;
  tree.before(input, note);
  const items = [...tree.querySelectorAll("li")];
  const folds = [...tree.querySelectorAll("details")];
  const within = (label, part, first, last) => {
    const run = /^(\d+)-(\d+)(?:\/(\d+))?$/.exec(label.range || "");
    if (run) {
      if (!/^\d*$/.test(part)) return false;
      const n = Number(part), step = Number(run[3] || 1);
      return part === "" || (n >= run[1] && n <= run[2] && (n - run[1]) % step === 0);
    }
    if (first && last) return label.text.includes(part);
    if (last) return label.text.startsWith(part);
    return label.text === part || (first && !/^\d+$/.test(part) && label.text.endsWith(part));
  };
  const labels = (item) => {
    const found = [];
    for (let li = item; li && tree.contains(li); li = li.parentElement.closest("li")) {
      const own = li.dataset.range
        ? [{ range: li.dataset.range }]
        : (li.dataset.name || "").toLowerCase().split(".").map((text) => ({ text }));
      found.unshift(...own);
    }
    return found;
  };
  const leaves = items.filter((li) => !li.dataset.more && !li.querySelector(":scope > details > ul"));
  let paths = null, opened = null;
  const search = () => {
    const query = input.value.trim().toLowerCase();
    if (!query) {
      if (opened) folds.forEach((fold, n) => { fold.open = opened[n]; });
      opened = null;
      for (const li of items) li.hidden = false;
      note.hidden = true;
      return;
    }
    opened = opened || folds.map((fold) => fold.open);
    paths = paths || leaves.map(labels);
    const parts = query.split(".");
    const keep = new Set();
    let count = 0;
    leaves.forEach((leaf, n) => {
      const path = paths[n];
      const fits = (at) => parts.every((part, k) => within(path[at + k], part, k === 0, k === parts.length - 1));
      let found = false;
      for (let at = 0; at + parts.length <= path.length && !found; at++) found = fits(at);
      if (!found) return;
      count++;
      for (let li = leaf; li && tree.contains(li); li = li.parentElement.closest("li")) keep.add(li);
    });
    for (const li of items) li.hidden = !keep.has(li);
    folds.forEach((fold) => { fold.open = keep.has(fold.parentElement); });
    const cut = items.some((li) => li.dataset.more);
    note.textContent = `${count} of ${leaves.length} rows` + (cut ? "; names that are not listed are not searched" : "");
    note.hidden = false;
  };
  input.addEventListener("input", search);
  for (const kind of ["keydown", "keypress", "keyup"]) input.addEventListener(kind, (event) => event.stopPropagation());
}
