// A heat map from the whole down to one element: a pyramid of tiles that are asked for as they come into view.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { shortNumber, ticks } from "./axis";
import { categoryColour, isBright } from "./colours";
import type { Scale } from "./colourscale";
import { partText, tilesFor, whole, within, zoomed, type Part, type Size, type Tile } from "./pyramid";
import { cellValue, seenOf, type Seen } from "./seen";
import { grouped } from "./text";
import "./heatmap.css";

/** The values of a tile: one for each cell, NaN where there is none. */
export interface Values {
  mean: ArrayLike<number>;
  min: ArrayLike<number>;
  max: ArrayLike<number>;
  nan?: ArrayLike<number>;
  inf?: ArrayLike<number>;
  exact: boolean;
  /** Whether each cell is one element. */
  single: boolean;
  /** How many elements are in files that cannot be read. */
  lost?: number;
}

/** Joins pictures that show the same part: what moves one moves all. */
export class Link {
  private readonly pictures = new Set<(part: Part) => void>();

  /** Calls `follow` with each part that another picture shows, until the answer is called. */
  join(follow: (part: Part) => void): () => void {
    this.pictures.add(follow);
    return () => this.pictures.delete(follow);
  }

  tell(part: Part, teller: (part: Part) => void): void {
    for (const follow of this.pictures) if (follow !== teller) follow(part);
  }
}

export type How = "mean" | "min" | "max" | "absmax";

/** A rectangle of elements that is outlined. */
export interface Outline {
  rows: readonly [number, number];
  cols: readonly [number, number];
  label: string;
  group: number;
  missing: boolean;
}

export interface Mark {
  row: number;
  col: number;
  odd: boolean;
  label: string;
}

interface Props {
  size: Size;
  /** The whole as a tile, of at most `most` rows and columns of cells, and its values. */
  first: Tile;
  root: Values;
  most: number;
  /** Loads a finer tile; without it the picture has only the cells of the whole. */
  load?(tile: Tile, signal: AbortSignal): Promise<Values>;
  how: How;
  scale: Scale;
  table: Uint8Array;
  /** The part that is shown; by default all. */
  part?: Part;
  onPart(part: Part | undefined): void;
  /** Called with the cells in view when all of them are loaded; with undefined if all of the picture is in view. */
  onSeen?(seen: Seen | undefined): void;
  /** The pictures that show the same part. */
  link?: Link;
  label: string;
  rowTitle: string;
  colTitle: string;
  /** The index of an element as text. */
  indexText(row: number, col: number): string;
  outlines?: Outline[];
  marks?: Mark[];
  /** Norms of groups of rows and of columns, drawn beside them. */
  rowNorms?: ArrayLike<number>;
  colNorms?: ArrayLike<number>;
  height?: number;
}

const AT_ONCE = 4; // requests
const KEPT = 160; // tiles
const TEXT = { w: 54, h: 17 }; // pixels of a cell that has room for its value

interface Kept {
  tile: Tile;
  values?: Values;
  error?: string;
  image?: HTMLCanvasElement;
  version?: object;
  abort?: AbortController;
}

export function HeatMap(props: Props) {
  const { size, root, most, how, scale, table, height = 520, rowNorms, colNorms } = props;
  const canvas = useRef<HTMLCanvasElement>(null);
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(900);
  const [busy, setBusy] = useState({ loading: 0, error: "" });
  const [near, setNear] = useState<{ x: number; y: number; text: string } | null>(null);
  const now = useRef(props);
  now.current = props;
  const inner = useMemo(() => {
    const left = 62, top = colNorms ? 50 : 8, right = rowNorms ? 54 : 10, bottom = 40;
    return { left, top, w: Math.max(60, width - left - right), h: Math.max(60, height - top - bottom) };
  }, [width, height, !!rowNorms, !!colNorms]);
  const pixels = { height: inner.h, width: inner.w };
  const view = useRef<Part>(within(props.part ?? whole(size), size, pixels));
  const tiles = useRef(new Map<string, Kept>());
  const version = useMemo(() => ({}), [how, scale, table]);
  const frame = useRef(0);
  const timers = useRef({ fetch: 0, route: 0 });
  const sent = useRef(props.part && partText(props.part));

  useLayoutEffect(() => {
    const observer = new ResizeObserver(() => setWidth(Math.max(280, box.current!.clientWidth)));
    observer.observe(box.current!);
    return () => observer.disconnect();
  }, []);

  const draw = () => {
    cancelAnimationFrame(frame.current);
    frame.current = requestAnimationFrame(() => {
      const element = canvas.current;
      if (element) paint(element, now.current, view.current, inner, tiles.current, version, near);
    });
  };

  const isWhole = () => {
    const [all, { r0, r1, c0, c1 }] = [whole(size), view.current];
    return r0 <= 0 && c0 <= 0 && r1 >= all.r1 && c1 >= all.c1;
  };

  const tellSeen = () => {
    const { onSeen, how } = now.current;
    if (!onSeen) return;
    if (isWhole()) {
      onSeen(undefined);
      return;
    }
    const wanted = tilesFor(view.current, pixels, size, most).map(({ key }) => tiles.current.get(key));
    const shown = wanted.length ? wanted : [tiles.current.get("root")];
    if (!shown.every((kept) => kept?.values || kept?.error)) return;
    onSeen(seenOf(shown.flatMap((kept) => (kept?.values ? { tile: kept.tile, values: kept.values } : [])), view.current, how));
  };

  const fetchTiles = () => {
    const load = now.current.load;
    if (!load) return;
    const wanted = tilesFor(view.current, pixels, size, most);
    const keys = new Set(wanted.map(({ key }) => key));
    for (const [key, kept] of tiles.current) {
      if (key !== "root" && !keys.has(key) && kept.abort) {
        kept.abort.abort();
        tiles.current.delete(key);
      }
    }
    let running = [...tiles.current.values()].filter((kept) => kept.abort).length;
    const missing = wanted.filter(({ key }) => !tiles.current.has(key));
    for (const tile of missing) {
      if (running >= AT_ONCE) break;
      running += 1;
      const kept: Kept = { tile, abort: new AbortController() };
      tiles.current.set(tile.key, kept);
      const ended = () => {
        kept.abort = undefined;
        draw();
        fetchTiles();
      };
      load(tile, kept.abort!.signal).then(
        (values) => {
          if (kept.abort?.signal.aborted) return;
          kept.values = values;
          ended();
        },
        (error: Error) => {
          if (kept.abort?.signal.aborted) return;
          kept.error = error.message;
          ended();
        },
      );
    }
    for (const key of tiles.current.keys()) {
      if (tiles.current.size <= KEPT) break;
      if (key !== "root" && !keys.has(key)) tiles.current.delete(key);
    }
    const shown = [...tiles.current.values()];
    setBusy({
      loading: shown.filter((kept) => kept.abort).length,
      error: shown.find((kept) => kept.error && keys.has(kept.tile.key))?.error ?? "",
    });
    tellSeen();
  };

  const show = (part: Part, told = true) => {
    view.current = within(part, size, pixels);
    draw();
    clearTimeout(timers.current.fetch);
    timers.current.fetch = window.setTimeout(fetchTiles, 70);
    if (!told) return;
    now.current.link?.tell(view.current, follow);
    clearTimeout(timers.current.route);
    timers.current.route = window.setTimeout(() => {
      const isAll = isWhole();
      sent.current = isAll ? undefined : partText(view.current);
      now.current.onPart(isAll ? undefined : view.current);
    }, 250);
  };

  const latest = useRef(show);
  latest.current = show;
  const follow = useMemo(() => (part: Part) => latest.current(part, false), []);
  useEffect(() => props.link?.join(follow), [props.link]);

  useLayoutEffect(tellSeen, [how]);
  useEffect(() => {
    tiles.current.set("root", { tile: props.first, values: root });
    show(view.current, false);
  }, [root]);
  useEffect(() => {
    const text = props.part && partText(props.part);
    if (text !== sent.current) {
      sent.current = text;
      show(props.part ?? whole(size), false);
    }
  }, [props.part && partText(props.part)]);
  useEffect(() => show(view.current, false), [inner]);
  useEffect(draw);
  useLayoutEffect(() => {
    // on paper the colours change at once
    if (canvas.current) paint(canvas.current, now.current, view.current, inner, tiles.current, version, near);
  }, [table]);
  useEffect(
    () => () => {
      cancelAnimationFrame(frame.current);
      clearTimeout(timers.current.fetch);
      clearTimeout(timers.current.route);
      for (const kept of tiles.current.values()) kept.abort?.abort();
    },
    [],
  );

  const at = (event: { clientX: number; clientY: number }) => {
    const rect = canvas.current!.getBoundingClientRect();
    const x = ((event.clientX - rect.left) * (width / rect.width) - inner.left) / inner.w;
    const y = ((event.clientY - rect.top) * (height / rect.height) - inner.top) / inner.h;
    return { x, y, inside: x >= 0 && x < 1 && y >= 0 && y < 1 };
  };

  useEffect(() => {
    const element = canvas.current!;
    const wheel = (event: WheelEvent) => {
      const { x, y, inside } = at(event);
      if (!inside) return;
      const factor = Math.exp(Math.max(-0.5, Math.min(0.5, event.deltaY * (event.ctrlKey ? 0.01 : 0.0016))));
      const next = within(zoomed(view.current, factor, y, x), size, pixels);
      if (partText(next) === partText(view.current)) return; // at the end: the page scrolls
      event.preventDefault();
      show(next);
    };
    element.addEventListener("wheel", wheel, { passive: false });
    return () => element.removeEventListener("wheel", wheel);
  });

  const pointers = useRef(new Map<number, { x: number; y: number }>());
  const onDown = (event: PointerEvent) => {
    const { x, y, inside } = at(event);
    if (!inside) return;
    canvas.current!.setPointerCapture(event.pointerId);
    pointers.current.set(event.pointerId, { x, y });
  };
  const onMove = (event: PointerEvent) => {
    const { x, y, inside } = at(event);
    const held = pointers.current.get(event.pointerId);
    if (held) {
      const part = view.current;
      const others = [...pointers.current].filter(([id]) => id !== event.pointerId).map(([, one]) => one);
      if (others.length) {
        const other = others[0]!;
        const before = Math.hypot(held.x - other.x, held.y - other.y);
        const after = Math.hypot(x - other.x, y - other.y);
        if (before > 0.01 && after > 0.01) show(zoomed(part, before / after, other.y, other.x));
      } else {
        const [dr, dc] = [(held.y - y) * (part.r1 - part.r0), (held.x - x) * (part.c1 - part.c0)];
        show({ r0: part.r0 + dr, r1: part.r1 + dr, c0: part.c0 + dc, c1: part.c1 + dc });
      }
      pointers.current.set(event.pointerId, { x, y });
      setNear(null);
      return;
    }
    setNear(inside ? { x, y, text: told(now.current, view.current, tiles.current, x, y, pixels) } : null);
  };
  const onUp = (event: PointerEvent) => pointers.current.delete(event.pointerId);

  const step = (rows: number, cols: number) => {
    const { r0, r1, c0, c1 } = view.current;
    const [dr, dc] = [rows * (r1 - r0), cols * (c1 - c0)];
    show({ r0: r0 + dr, r1: r1 + dr, c0: c0 + dc, c1: c1 + dc });
  };
  const onKey = (event: KeyboardEvent) => {
    const far = event.shiftKey ? 0.9 : 0.1;
    const keys: Record<string, () => void> = {
      "+": () => show(zoomed(view.current, 0.5, 0.5, 0.5)),
      "=": () => show(zoomed(view.current, 0.5, 0.5, 0.5)),
      "-": () => show(zoomed(view.current, 2, 0.5, 0.5)),
      "0": () => show(whole(size)),
      Home: () => show(whole(size)),
      ArrowUp: () => step(-far, 0),
      ArrowDown: () => step(far, 0),
      ArrowLeft: () => step(0, -far),
      ArrowRight: () => step(0, far),
    };
    const found = keys[event.key];
    if (!found || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    found();
  };

  return (
    <div class="heatmap" ref={box}>
      <canvas
        ref={canvas}
        role="img"
        tabIndex={0}
        aria-label={`${props.label}. Plus and minus zoom, arrows move, 0 shows all.`}
        style={{ height: `${height}px` }}
        onPointerDown={onDown}
        onPointerMove={onMove}
        onPointerUp={onUp}
        onPointerCancel={onUp}
        onPointerLeave={() => setNear(null)}
        onDblClick={(event) => {
          const { x, y, inside } = at(event);
          if (inside) show(zoomed(view.current, event.shiftKey ? 2.5 : 0.4, y, x));
        }}
        onKeyDown={onKey}
      />
      {near && near.text && (
        <div
          class="tip"
          style={{
            left: `${Math.min(inner.left + near.x * inner.w + 14, width - 230)}px`,
            top: `${inner.top + near.y * inner.h + (near.y > 0.7 ? -84 : 16)}px`,
          }}
        >
          {near.text}
        </div>
      )}
      <div class="heatmap-zoom" role="group" aria-label="zoom">
        <button type="button" aria-label="zoom in" title="zoom in (+)" onClick={() => show(zoomed(view.current, 0.5, 0.5, 0.5))}>+</button>
        <button type="button" aria-label="zoom out" title="zoom out (-)" onClick={() => show(zoomed(view.current, 2, 0.5, 0.5))}>−</button>
        <button type="button" aria-label="show all" title="show all (0)" onClick={() => show(whole(size))}>⤢</button>
      </div>
      <p class="heatmap-status quiet" role="status">
        {busy.error || (busy.loading ? "reading …" : "")}
      </p>
    </div>
  );
}

/** The finest loaded tile at a place, the number of its cell there, and the elements of the cell. */
function cellAt(tiles: Map<string, Kept>, row: number, col: number) {
  let best: { kept: Kept; n: number; rows: [number, number]; cols: [number, number] } | undefined;
  for (const kept of tiles.values()) {
    const { tile, values } = kept;
    if (!values || row < tile.r0 || row >= tile.r1 || col < tile.c0 || col >= tile.c1) continue;
    const [high, wide] = [(tile.r1 - tile.r0) / tile.rows, (tile.c1 - tile.c0) / tile.cols];
    if (best && (best.rows[1] - best.rows[0]) * (best.cols[1] - best.cols[0]) <= high * wide) continue;
    const [i, j] = [Math.floor((row - tile.r0) / high), Math.floor((col - tile.c0) / wide)];
    best = {
      kept, n: i * tile.cols + j,
      rows: [Math.floor(tile.r0 + i * high + 1e-9), Math.floor(tile.r0 + (i + 1) * high + 1e-9)],
      cols: [Math.floor(tile.c0 + j * wide + 1e-9), Math.floor(tile.c0 + (j + 1) * wide + 1e-9)],
    };
  }
  return best;
}

function told(props: Props, part: Part, tiles: Map<string, Kept>, x: number, y: number, pixels: Size): string {
  const row = part.r0 + y * (part.r1 - part.r0);
  const col = part.c0 + x * (part.c1 - part.c0);
  const mark = props.marks?.find(
    (one) =>
      Math.abs((one.row + 0.5 - row) / (part.r1 - part.r0)) * pixels.height < 6 &&
      Math.abs((one.col + 0.5 - col) / (part.c1 - part.c0)) * pixels.width < 6,
  );
  const found = cellAt(tiles, row, col);
  const lines = mark ? [mark.label] : [];
  if (found) {
    const { values } = found.kept;
    const one = found.rows[1] - found.rows[0] <= 1 && found.cols[1] - found.cols[0] <= 1;
    lines.push(
      one
        ? `${props.indexText(found.rows[0], found.cols[0])}  ${exactNumber(values!.mean, found.n)}`
        : `rows ${interval(found.rows)}, columns ${interval(found.cols)}`,
    );
    if (!one) {
      lines.push(`mean ${shortNumber(values!.mean[found.n]!)}  min ${shortNumber(values!.min[found.n]!)}  max ${shortNumber(values!.max[found.n]!)}`);
      if (!values!.exact) lines.push("of a sample");
    }
    const [nan, inf] = [values!.nan?.[found.n] ?? 0, values!.inf?.[found.n] ?? 0];
    if (nan || inf) lines.push([nan && `${grouped(nan)} NaN`, inf && `${grouped(inf)} infinite`].filter(Boolean).join(", "));
  }
  return lines.join("\n");
}

/** An element with all digits that tell it from its neighbours of the same dtype. */
function exactNumber(values: ArrayLike<number>, n: number): string {
  const value = values[n]!;
  return Number.isNaN(value) ? "not finite" : String(values instanceof Float32Array ? Number(value.toPrecision(9)) : value);
}

function interval([a, b]: [number, number]): string {
  return b - a <= 1 ? grouped(a) : `${grouped(a)}–${grouped(b - 1)}`;
}

/** A short text for a cell. */
export function cellText(value: number): string {
  if (Number.isNaN(value)) return "";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(size < 0.01 ? 3 : size < 1000 ? 4 : 5)));
}

function image(kept: Kept, props: Props, version: object, bad: [number, number, number]): HTMLCanvasElement {
  if (kept.image && kept.version === version) return kept.image;
  const { rows, cols } = kept.tile;
  const found = kept.image ?? document.createElement("canvas");
  found.width = cols;
  found.height = rows;
  const context = found.getContext("2d")!;
  const data = context.createImageData(cols, rows);
  const { values } = kept;
  for (let n = 0; n < rows * cols; n += 1) {
    const value = cellValue(values!, props.how, n);
    const odd = (values!.nan?.[n] ?? 0) + (values!.inf?.[n] ?? 0) > 0;
    if (Number.isNaN(value)) {
      if (!odd) continue; // there is no element
      data.data.set([...bad, 255], 4 * n);
      continue;
    }
    const at = 3 * Math.round(props.scale.position(value) * 255);
    data.data[4 * n] = props.table[at]!;
    data.data[4 * n + 1] = props.table[at + 1]!;
    data.data[4 * n + 2] = props.table[at + 2]!;
    data.data[4 * n + 3] = 255;
  }
  context.putImageData(data, 0, 0);
  kept.image = found;
  kept.version = version;
  return found;
}

interface Inner {
  left: number;
  top: number;
  w: number;
  h: number;
}

function paint(
  canvas: HTMLCanvasElement,
  props: Props,
  part: Part,
  inner: Inner,
  tiles: Map<string, Kept>,
  version: object,
  near: { x: number; y: number } | null,
): void {
  const dpr = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width || !height) return;
  if (canvas.width !== Math.round(width * dpr) || canvas.height !== Math.round(height * dpr)) {
    canvas.width = Math.round(width * dpr);
    canvas.height = Math.round(height * dpr);
  }
  // a finger moves the picture, or the page if all of the picture is shown
  const isAll = part.r1 - part.r0 >= props.size.height && part.c1 - part.c0 >= props.size.width;
  canvas.style.touchAction = isAll ? "pan-y" : "none";
  const style = getComputedStyle(canvas);
  const colour = (name: string) => style.getPropertyValue(name).trim() || "#888";
  const [paper, ink, quiet, line, accent, bad] = ["--paper", "--ink", "--quiet", "--line", "--accent", "--bad"].map(colour) as [
    string, string, string, string, string, string,
  ];
  const context = canvas.getContext("2d")!;
  context.setTransform(dpr, 0, 0, dpr, 0, 0);
  context.fillStyle = paper;
  context.fillRect(0, 0, width, height);
  context.imageSmoothingEnabled = false;
  const { left, top, w, h } = inner;
  const sx = w / (part.c1 - part.c0);
  const sy = h / (part.r1 - part.r0);
  const px = (c: number) => left + (c - part.c0) * sx;
  const py = (r: number) => top + (r - part.r0) * sy;

  context.save();
  context.beginPath();
  context.rect(left, top, w, h);
  context.clip();
  context.fillStyle = colour("--raised");
  context.fillRect(left, top, w, h);
  const wanted = new Set(tilesFor(part, { height: h, width: w }, props.size, props.most).map(({ key }) => key));
  const order = [...tiles.values()].filter(({ values }) => values);
  const area = ({ tile }: Kept) => ((tile.r1 - tile.r0) / tile.rows) * ((tile.c1 - tile.c0) / tile.cols);
  order.sort((a, b) => Number(wanted.has(a.tile.key)) - Number(wanted.has(b.tile.key)) || area(b) - area(a));
  const rgb = /^#(..)(..)(..)$/.exec(bad)?.slice(1).map((one) => parseInt(one, 16)) as [number, number, number] | undefined;
  for (const kept of order) {
    const { tile } = kept;
    if (tile.r1 <= part.r0 || tile.r0 >= part.r1 || tile.c1 <= part.c0 || tile.c0 >= part.c1) continue;
    const finer = area(kept) < 0.999 * (1 / (sx * sy)) / 4 && !wanted.has(tile.key) && tile.key !== "root";
    if (finer) continue; // much finer than the pixels: it would flicker
    const [x0, x1, y0, y1] = [px(tile.c0), px(tile.c1), py(tile.r0), py(tile.r1)];
    context.drawImage(image(kept, props, version, rgb ?? [220, 40, 40]), x0, y0, x1 - x0, y1 - y0);
  }
  for (const kept of order) oddMarks(context, kept, px, py, sx, sy, bad);
  if (sx >= 14 && sy >= 14) {
    context.strokeStyle = paper;
    context.globalAlpha = 0.35;
    context.lineWidth = 1;
    context.beginPath();
    for (let c = Math.ceil(part.c0); c <= part.c1; c += 1) {
      context.moveTo(px(c), top);
      context.lineTo(px(c), top + h);
    }
    for (let r = Math.ceil(part.r0); r <= part.r1; r += 1) {
      context.moveTo(left, py(r));
      context.lineTo(left + w, py(r));
    }
    context.stroke();
    context.globalAlpha = 1;
  }
  if (sx >= TEXT.w && sy >= TEXT.h) {
    context.font = `${Math.min(12, Math.floor(sy * 0.6))}px ${style.fontFamily}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let r = Math.floor(part.r0); r < part.r1; r += 1) {
      for (let c = Math.floor(part.c0); c < part.c1; c += 1) {
        const cell = cellAt(tiles, r, c);
        if (!cell || cell.rows[1] - cell.rows[0] > 1 || cell.cols[1] - cell.cols[0] > 1) continue;
        const { values } = cell.kept;
        const value = cellValue(values!, props.how, cell.n);
        const odd = values!.nan?.[cell.n] ? "NaN" : values!.inf?.[cell.n] ? "±Inf" : "";
        context.fillStyle = odd ? "#fff" : isBright(props.table, props.scale.position(value)) ? "#111" : "#fff";
        context.fillText(odd || cellText(value), px(c) + sx / 2, py(r) + sy / 2);
      }
    }
  }
  if (props.outlines) outlined(context, props.outlines, px, py, ink, paper, bad, inner);
  for (const mark of props.marks ?? []) {
    const [x, y] = [px(mark.col + 0.5), py(mark.row + 0.5)];
    if (x < left - 8 || x > left + w + 8 || y < top - 8 || y > top + h + 8) continue;
    const r = Math.max(4.5, Math.min(sx, sy) / 2);
    for (const [stroke, wide] of [[paper, 3.5], [mark.odd ? bad : accent, 1.75]] as const) {
      context.strokeStyle = stroke;
      context.lineWidth = wide;
      context.beginPath();
      if (mark.odd) {
        if (sx >= TEXT.w && sy >= TEXT.h) break; // the cell says NaN or Inf itself
        context.moveTo(x - r, y - r);
        context.lineTo(x + r, y + r);
        context.moveTo(x + r, y - r);
        context.lineTo(x - r, y + r);
      } else if (sx > 14 && sy > 10) context.rect(px(mark.col) + 1, py(mark.row) + 1, sx - 2, sy - 2);
      else context.arc(x, y, r, 0, 7);
      context.stroke();
    }
  }
  if (near) {
    const cell = cellAt(tiles, part.r0 + near.y * (part.r1 - part.r0), part.c0 + near.x * (part.c1 - part.c0));
    if (cell) {
      const [x, y] = [px(cell.cols[0]), py(cell.rows[0])];
      const [cw, ch] = [px(cell.cols[1]) - x, py(cell.rows[1]) - y];
      if (cw > 5 && ch > 5) {
        context.strokeStyle = ink;
        context.lineWidth = 1.5;
        context.strokeRect(x, y, cw, ch);
      }
    }
  }
  context.restore();

  context.strokeStyle = line;
  context.lineWidth = 1;
  context.strokeRect(left - 0.5, top - 0.5, w + 1, h + 1);
  context.fillStyle = quiet;
  context.font = `11px ${style.fontFamily}`;
  context.textBaseline = "top";
  context.textAlign = "center";
  for (const c of ticks(part.c0, part.c1 - 1e-9, Math.max(2, w / 90))) {
    if (!Number.isInteger(c) || c >= props.size.width) continue;
    const x = px(c + (sx > 6 ? 0.5 : 0));
    if (x > left + w) continue;
    context.fillRect(Math.round(x), top + h, 1, 4);
    context.fillText(grouped(c), Math.max(left + 4, Math.min(left + w - 8, x)), top + h + 7);
  }
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const r of ticks(part.r0, part.r1 - 1e-9, Math.max(2, h / 60))) {
    if (!Number.isInteger(r) || r >= props.size.height) continue;
    const y = py(r + (sy > 6 ? 0.5 : 0));
    if (y > top + h) continue;
    context.fillRect(left - 4, Math.round(y), 4, 1);
    context.fillText(grouped(r), left - 7, Math.max(top + 6, y));
  }
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  context.fillText(props.colTitle, left + w / 2, height - 4);
  context.save();
  context.translate(11, top + h / 2);
  context.rotate(-Math.PI / 2);
  context.fillText(props.rowTitle, 0, 0);
  context.restore();
  if (props.colNorms) norms(context, props.colNorms, props.size.width, part.c0, part.c1, { left, top: 4, w, h: top - 10 }, false, accent, quiet);
  if (props.rowNorms) {
    norms(context, props.rowNorms, props.size.height, part.r0, part.r1, { left: left + w + 6, top, w: width - left - w - 10, h }, true, accent, quiet);
  }
}

/** Marks cells with NaN or infinities, also where a cell is smaller than a mark. */
function oddMarks(
  context: CanvasRenderingContext2D,
  { tile, values }: Kept,
  px: (c: number) => number,
  py: (r: number) => number,
  sx: number,
  sy: number,
  bad: string,
): void {
  if (!values?.nan && !values?.inf) return;
  const [high, wide] = [(tile.r1 - tile.r0) / tile.rows, (tile.c1 - tile.c0) / tile.cols];
  if (high * sy > 6 && wide * sx > 6 && values.single) return; // the cell itself shows it
  context.fillStyle = bad;
  let drawn = 0;
  for (let n = 0; n < tile.rows * tile.cols && drawn < 2000; n += 1) {
    if (!(values.nan?.[n] || values.inf?.[n])) continue;
    drawn += 1;
    const [x, y] = [px(tile.c0 + ((n % tile.cols) + 0.5) * wide), py(tile.r0 + (Math.floor(n / tile.cols) + 0.5) * high)];
    context.fillRect(x - 2, y - 2, 4, 4);
  }
}

function outlined(
  context: CanvasRenderingContext2D,
  outlines: Outline[],
  px: (c: number) => number,
  py: (r: number) => number,
  ink: string,
  paper: string,
  bad: string,
  inner: Inner,
): void {
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "left";
  context.textBaseline = "top";
  for (const one of outlines) {
    const [x, y] = [px(one.cols[0]), py(one.rows[0])];
    const [w, h] = [px(one.cols[1]) - x, py(one.rows[1]) - y];
    if (x > inner.left + inner.w || y > inner.top + inner.h || x + w < inner.left || y + h < inner.top) continue;
    for (const [stroke, wide] of [[paper, 3], [one.missing ? bad : categoryColour(one.group), 1.5]] as const) {
      context.strokeStyle = stroke;
      context.lineWidth = wide;
      context.strokeRect(x + 1, y + 1, w - 2, h - 2);
    }
    const text = one.missing ? `${one.label}: missing` : one.label;
    const room = context.measureText(text).width + 8;
    const [tx, ty] = [Math.max(x, inner.left) + 2, Math.max(y, inner.top) + 2];
    if (room < Math.min(x + w, inner.left + inner.w) - tx && h > 18) {
      context.fillStyle = paper;
      context.globalAlpha = 0.85;
      context.fillRect(tx, ty, room, 15);
      context.globalAlpha = 1;
      context.fillStyle = one.missing ? bad : ink;
      context.fillText(text, tx + 4, ty + 2);
    }
  }
}

/** Norms of groups as bars beside the picture. */
function norms(
  context: CanvasRenderingContext2D,
  values: ArrayLike<number>,
  length: number,
  from: number,
  to: number,
  room: Inner,
  down: boolean,
  accent: string,
  quiet: string,
): void {
  let most = 0;
  for (let n = 0; n < values.length; n += 1) if (Number.isFinite(values[n]!)) most = Math.max(most, values[n]!);
  if (!(most > 0)) return;
  const each = length / values.length;
  context.save();
  context.beginPath();
  context.rect(room.left, room.top, room.w, room.h);
  context.clip();
  context.fillStyle = accent;
  context.globalAlpha = 0.75;
  const first = Math.max(0, Math.floor(from / each));
  const last = Math.min(values.length, Math.ceil(to / each));
  const along = (down ? room.h : room.w) / (to - from);
  const bars = Math.max(1, Math.floor((last - first) / (down ? room.h : room.w)));
  for (let n = first; n < last; n += bars) {
    let value = 0;
    for (let k = n; k < Math.min(n + bars, last); k += 1) value = Math.max(value, Math.min(values[k]!, most) || 0);
    const start = (n * each - from) * along;
    const size = Math.max(1, bars * each * along - (each * along > 4 ? 1 : 0));
    if (down) context.fillRect(room.left, room.top + start, (value / most) * room.w, size);
    else context.fillRect(room.left + start, room.top + room.h * (1 - value / most), size, (value / most) * room.h);
  }
  context.restore();
  context.fillStyle = quiet;
  context.font = "10px system-ui, sans-serif";
  context.textAlign = "right";
  context.textBaseline = down ? "alphabetic" : "top";
  if (down) context.fillText(shortNumber(most), room.left + room.w, room.top - 4);
  else context.fillText(shortNumber(most), room.left - 4, room.top);
}
