// Files that the page makes, such as tables as CSV, and what it copies.

import { shownName } from "./text";

export function saveBlob(name: string, blob: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = fileName(name);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A name that every system takes as a file's. */
export function fileName(name: string): string {
  return shownName(name).replace(/[^\w.\-]+/g, "_").slice(-120) || "picture";
}

export type Cell = string | number | boolean | null | undefined;

const NUMBER = /^[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|inf|nan)(?:[-+].*j)?$/i; // also a complex one

/** Rows as CSV (RFC 4180). A text that a spreadsheet would take for a formula gets an apostrophe in front; a number does not. */
export function toCsv(head: string[], rows: Iterable<Cell[]>): string {
  const lines = [head.map(csvCell).join(",")];
  for (const row of rows) lines.push(row.map(csvCell).join(","));
  return lines.join("\r\n") + "\r\n";
}

function csvCell(value: Cell): string {
  if (value === null || value === undefined) return "";
  if (typeof value !== "string") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) && !NUMBER.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function saveCsv(name: string, head: string[], rows: Iterable<Cell[]>): void {
  saveBlob(`${name}.csv`, new Blob([toCsv(head, rows)], { type: "text/csv;charset=utf-8" }));
}

/** Puts a text on the clipboard, also on pages where the browser has no clipboard for scripts. */
export async function copyText(text: string): Promise<void> {
  if (navigator.clipboard && isSecureContext) {
    try {
      await navigator.clipboard.writeText(text);
      return;
    } catch {
      // the browser asks the user, who may refuse: the other way needs no permission
    }
  }
  const area = document.createElement("textarea");
  area.value = text;
  area.style.position = "fixed";
  area.style.opacity = "0";
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
