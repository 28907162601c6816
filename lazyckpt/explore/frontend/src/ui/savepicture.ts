// Saved pictures: as SVG and PNG, each with its title, what it is of, and what its colours stand for.

import { saveBlob } from "./save";

const STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "stroke-linejoin",
  "font-family", "font-size", "font-weight", "text-anchor", "dominant-baseline", "paint-order", "opacity", "display", "visibility",
] as const;

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = 14; // pixels around a saved picture
const LEAST = 420; // pixels of width, for the title

/** A copy of an svg with the styles that it has on the page. */
function copied(svg: SVGSVGElement): SVGSVGElement {
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
  const box = svg.getAttribute("viewBox") ?? `0 0 ${width} ${height}`;
  for (const [key, value] of Object.entries({ viewBox: box, width, height, overflow: "visible" })) copy.setAttribute(key, String(value));
  return copy;
}

export type Picture = SVGSVGElement | HTMLCanvasElement;

export interface Saved {
  picture: Picture;
  /** The title, and lines below it: what it is of, and units. */
  head: string[];
  /** What says on the page what the colours stand for. */
  legends: Element[];
}

interface Drawn {
  svg: SVGSVGElement;
  width: number;
  height: number;
  /** Where the picture is. */
  place: { x: number; y: number; width: number; height: number };
}

/** A picture as a document of its own, on the page's paper: with its title, what it is of, and what its colours are. */
function drawn({ picture, head, legends }: Saved): Drawn {
  const root = picture.closest(".lazyckpt-explorer") ?? document.body;
  const { backgroundColor, fontFamily } = getComputedStyle(root);
  const { width: wide, height: high } = picture.getBoundingClientRect();
  const width = Math.ceil(Math.max(wide, LEAST, ...legends.map(widthOf)) + 2 * MARGIN);
  const svg = element("svg", {}) as SVGSVGElement;
  const paper = element("rect", { x: 0, y: 0, fill: backgroundColor });
  svg.append(paper);
  let y = MARGIN;
  head.filter(Boolean).forEach((line, n) => {
    const [size, weight] = n ? [12, "400"] : [15, "600"];
    const fill = getComputedStyle(root).getPropertyValue(n ? "--quiet" : "--ink").trim();
    for (const part of lines(line, `${weight} ${size}px ${fontFamily}`, width - 2 * MARGIN)) {
      y += size + 5;
      svg.append(element("text", { x: MARGIN, y: y - 5, fill, "font-family": fontFamily, "font-size": size, "font-weight": weight }, part));
    }
  });
  y += 8;
  const place = { x: MARGIN, y, width: wide, height: high };
  if (picture instanceof SVGSVGElement) svg.append(moved(copied(picture), MARGIN, y));
  else svg.append(element("image", { ...place, href: picture.toDataURL("image/png") }));
  y += high;
  for (const legend of legends) {
    const area = legend.getBoundingClientRect();
    y += 12;
    svg.append(...parts(legend, area.left - MARGIN, area.top - y));
    y += area.height;
  }
  const height = Math.ceil(y + MARGIN);
  for (const [key, value] of Object.entries({ width, height })) paper.setAttribute(key, String(value));
  for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) svg.setAttribute(key, String(value));
  return { svg, width, height, place };
}

/** The width of what is in an element; it is itself as wide as the page. */
function widthOf(legend: Element): number {
  const range = document.createRange();
  range.selectNodeContents(legend);
  const left = legend.getBoundingClientRect().left;
  return Math.max(0, ...Array.from(range.getClientRects(), ({ right }) => right - left));
}

/** The pictures and texts in an element, where they stand in it. */
function parts(of: Element, left: number, top: number): Element[] {
  const found: Element[] = [];
  for (const node of of.childNodes) {
    if (node instanceof SVGSVGElement) {
      const area = node.getBoundingClientRect();
      found.push(moved(copied(node), area.left - left, area.top - top));
    } else if (node instanceof Element) {
      found.push(...parts(node, left, top));
    } else if (node instanceof Text) {
      const { color, fontFamily, fontSize } = getComputedStyle(of);
      const look = { fill: color, "font-family": fontFamily, "font-size": fontSize, "dominant-baseline": "central" };
      for (const { text, area } of linesIn(node)) found.push(element("text", { x: area.left - left, y: area.top + area.height / 2 - top, ...look }, text));
    }
  }
  return found;
}

/** The lines of a text as the page breaks it, and where each begins. */
function linesIn(node: Text): { text: string; area: DOMRect }[] {
  const found: { text: string; area: DOMRect }[] = [];
  for (const word of node.data.matchAll(/\S+/g)) {
    const range = document.createRange();
    range.setStart(node, word.index);
    range.setEnd(node, word.index + word[0].length);
    const area = range.getBoundingClientRect();
    const last = found[found.length - 1];
    if (last && Math.abs(last.area.top - area.top) < area.height / 2) last.text += ` ${word[0]}`;
    else found.push({ text: word[0], area });
  }
  return found;
}

function moved(svg: SVGSVGElement, x: number, y: number): SVGSVGElement {
  svg.setAttribute("x", String(x));
  svg.setAttribute("y", String(y));
  return svg;
}

function element(name: string, attributes: Record<string, string | number>, text = ""): Element {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.textContent = text;
  return made;
}

/** A text in lines that are as wide as there is room. */
function lines(text: string, font: string, room: number): string[] {
  const context = document.createElement("canvas").getContext("2d")!;
  context.font = font;
  const found = [""];
  for (const word of text.split(/\s+|(?<=[./_,])(?=\S)/)) {
    const last = found[found.length - 1]!;
    const joined = last && !text.includes(last + word) ? `${last} ${word}` : last + word;
    if (!last || context.measureText(joined).width <= room) found[found.length - 1] = joined;
    else found.push(word);
  }
  return found;
}

/** Saves a picture as SVG; the pixels of a canvas are an image in it. */
export function saveSvg(name: string, saved: Saved): void {
  const text = new XMLSerializer().serializeToString(drawn(saved).svg);
  saveBlob(`${name}.svg`, new Blob([text], { type: "image/svg+xml" }));
}

/** Saves a picture with two dots for each pixel of the page. */
export async function savePng(name: string, saved: Saved): Promise<void> {
  const { svg, width, height, place } = drawn(saved);
  const image = new Image();
  const { picture } = saved;
  if (picture instanceof HTMLCanvasElement) svg.querySelector("image")!.remove(); // it is drawn with all its dots
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(svg))}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * width, 2 * height];
  const context = canvas.getContext("2d")!;
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  if (picture instanceof HTMLCanvasElement) {
    context.imageSmoothingEnabled = false;
    context.drawImage(picture, 2 * place.x, 2 * place.y, 2 * place.width, 2 * place.height);
  }
  const blob = await new Promise<Blob | null>((resolve) => canvas.toBlob(resolve, "image/png"));
  if (!blob) throw new Error("the browser cannot make a PNG of this picture");
  saveBlob(`${name}.png`, blob);
}
