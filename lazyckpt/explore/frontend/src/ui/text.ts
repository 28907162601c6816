// Numbers, sizes and names as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(n: number): string {
  const [size, unit] = scaled(n, 1024, UNITS.length - 1);
  return `${size} ${UNITS[unit]}`;
}

/** A number in the unit in which it has one to four digits before the point once it is rounded, and that unit. */
function scaled(n: number, base: number, last: number): [string, number] {
  let unit = 0;
  while ((unit ? Math.round(n) : n) >= base && unit < last) {
    n /= base;
    unit += 1;
  }
  return [unit === 0 || n >= 99.95 ? n.toFixed(0) : n >= 9.995 ? n.toFixed(1) : n.toFixed(2), unit];
}

const COUNTS = ["", "K", "M", "B", "T"];

/** 6.74B for 6,738,415,616. */
export function count(n: number): string {
  const [text, unit] = scaled(n, 1000, COUNTS.length - 1);
  return `${text}${COUNTS[unit]}`;
}

/** "1 file", "2 files". */
export function counted(n: number, noun: string): string {
  return `${grouped(n)} ${noun}${n === 1 ? "" : "s"}`;
}

/** A text with a large first letter. */
export function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** 1,234,567 for 1234567. */
export function grouped(n: number): string {
  const [whole = "", part] = String(Math.round(n * 1000) / 1000).split(".");
  const found = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return part ? `${found}.${part}` : found;
}

export const UNSAFE = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/gu;
const LONGEST = 300;

/** A name from a file as one harmless line: control and direction characters are escaped, the middle of long ones left out. */
export function shownName(name: string, longest = LONGEST): string {
  const safe = /^[ -~]*$/.test(name) ? name : name.replace(UNSAFE, (c) => `\\u{${c.codePointAt(0)!.toString(16)}}`);
  return safe.length <= longest ? safe : `${safe.slice(0, longest / 2)}…${safe.slice(-longest / 2)}`;
}

/** A tensor's name as `shownName` shows it; the empty name as two quotation marks. */
export function shownTensor(name: string, longest = LONGEST): string {
  return name === "" ? "''" : shownName(name, longest);
}

/** A path or an address: of a long one, as many of its last parts as there is room for. */
export function shownPlace(place: string, longest = 56): string {
  const safe = shownName(place, 4000);
  if (safe.length <= longest) return safe;
  const parts = safe.split("/");
  let short = parts.pop()!;
  while (parts.length && short.length + parts[parts.length - 1]!.length + 3 <= longest) short = `${parts.pop()!}/${short}`;
  return `…/${shownName(short, longest)}`;
}

let ids = 0;

/** An id that no other element of the page has, whatever a notebook shows besides. */
export function newId(kind: string): string {
  ids += 1;
  return `lazyckpt-${PAGE}-${kind}-${ids}`;
}

const PAGE = Math.random().toString(36).slice(2, 8); // widgets load this module more than once
