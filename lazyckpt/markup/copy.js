// Offer to copy the name of the row under the pointer or with the focus: what view["..."] takes.
for (const root of document.querySelectorAll(".lazyckpt:not([data-copy])")) {
  root.dataset.copy = "1";
  const tree = root.querySelector(".tree:not(.side)");
  if (!tree) continue;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  const name = (row) => {
    const found = [];
    for (let li = row.closest("li"); li && tree.contains(li); li = li.parentElement.closest("li")) {
      found.unshift(li.dataset.range ? li.dataset.range.split("-")[0] : li.dataset.name || "");
    }
    return found.join(".");
  };
  const write = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {  // pages without permission, such as file:
      const area = document.createElement("textarea");
      area.value = text;
      root.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  };
  const offer = (event) => {
    const row = event.target.closest && event.target.closest(".row");
    const place = row && tree.contains(row) && !row.closest("[data-more]") && row.querySelector(".name");
    if (!place || button.parentElement === place) return;
    button.dataset.l = "copy";  // no text of the row: it is drawn by the style
    button.setAttribute("aria-label", `copy the name ${name(row)}`);
    place.append(button);
  };
  root.addEventListener("pointerover", offer);
  root.addEventListener("focusin", offer);
  root.addEventListener("pointerleave", () => button.remove());
  button.addEventListener("click", async (event) => {
    event.preventDefault();
    event.stopPropagation();
    await write(name(button.closest(".row")));
    button.dataset.l = "copied";
  });
}
