// Sets of keys, such as those of open rows, as the text of a parameter.

/** Keys as text, and back; "-" stands for none. */
export function textOf(keys: Iterable<string>): string {
  return [...new Set(keys)].map((key) => key.replace(/[\\,]/g, "\\$&")).join(",");
}

export function keysOf(text: string): Set<string> {
  if (text === "-" || text === "") return new Set();
  return new Set((text.match(/(?:\\.|[^,\\])+/gs) ?? []).map((key) => key.replace(/\\(.)/gs, "$1")));
}
