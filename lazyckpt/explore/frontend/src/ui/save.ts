// Files that the page makes: tables as CSV, pictures as SVG and PNG.

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

const STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "stroke-linejoin",
  "font-family", "font-size", "font-weight", "text-anchor", "dominant-baseline", "opacity", "display", "visibility",
] as const;

/** A picture of the page as a document of its own: with the styles that it has here, and on the page's paper. */
export function svgText(svg: SVGSVGElement): string {
  const copy = svg.cloneNode(true) as SVGSVGElement;
  const from = [svg, ...svg.querySelectorAll("*")];
  const to = [copy, ...copy.querySelectorAll("*")];
  from.forEach((element, n) => {
    const style = getComputedStyle(element);
    const target = to[n] as SVGElement;
    target.removeAttribute("style"); // which the page's security policy does not allow
    target.removeAttribute("class");
    for (const name of STYLES) target.setAttribute(name, style.getPropertyValue(name));
  });
  const { width, height } = svg.getBoundingClientRect();
  const box = svg.getAttribute("viewBox")?.split(/[\s,]+/) ?? ["0", "0", String(width), String(height)];
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("viewBox", box.join(" "));
  copy.setAttribute("width", String(width));
  copy.setAttribute("height", String(height));
  const paper = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  const root = svg.closest(".lazyckpt-explorer") ?? document.body;
  const [x, y, w, h] = box as [string, string, string, string];
  for (const [key, value] of Object.entries({ x, y, width: w, height: h, fill: getComputedStyle(root).backgroundColor })) {
    paper.setAttribute(key, value);
  }
  copy.insertBefore(paper, copy.firstChild);
  return new XMLSerializer().serializeToString(copy);
}

/** Saves a picture as SVG; the pixels of a canvas are an image in it. */
export function saveSvg(name: string, picture: SVGSVGElement | HTMLCanvasElement): void {
  const text = picture instanceof HTMLCanvasElement ? canvasText(picture) : svgText(picture);
  saveBlob(`${name}.svg`, new Blob([text], { type: "image/svg+xml" }));
}

function canvasText(canvas: HTMLCanvasElement): string {
  const { width, height } = canvas;
  const image = `<image width="${width}" height="${height}" href="${canvas.toDataURL("image/png")}"/>`;
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}">${image}</svg>`;
}

/** Saves a picture with two dots for each pixel of the page. */
export async function savePng(name: string, picture: SVGSVGElement | HTMLCanvasElement): Promise<void> {
  const canvas = picture instanceof HTMLCanvasElement ? picture : await drawn(picture);
  const blob = await new Promise<Blob | null>((resolve) => canvas.toBlob(resolve, "image/png"));
  if (!blob) throw new Error("the browser cannot make a PNG of this picture");
  saveBlob(`${name}.png`, blob);
}

async function drawn(svg: SVGSVGElement): Promise<HTMLCanvasElement> {
  const { width, height } = svg.getBoundingClientRect();
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(svg))}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = Math.ceil(width * 2);
  canvas.height = Math.ceil(height * 2);
  canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas;
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
