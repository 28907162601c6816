// A grid of coloured cells with labels, a tooltip and a legend.

import { useMemo, useRef, useState } from "preact/hooks";
import { logTicks, shortNumber, ticks } from "./axis";
import { Legend } from "./legend";
import { useWidth } from "./width";
import "./grid.css";

interface Props {
  /** Labels of the rows, from top to bottom, and of the columns. */
  rows: string[];
  columns: string[];
  /** Row by row; NaN is a cell without a value. */
  values: ArrayLike<number>;
  label: string;
  rowTitle?: string;
  columnTitle?: string;
  /** The colour of a share from 0 to 1, as CSS. */
  colour(share: number): string;
  log?: boolean;
  /** The ends of the colours; by default those of the values. */
  range?: [number, number];
  /** How a value is written in the legend. */
  format?(value: number): string;
  /** Lines of a cell's tooltip. */
  detail(row: number, column: number): string;
  /** A sign on a cell, such as "!". */
  mark?(row: number, column: number): string;
  onCell?(row: number, column: number): void;
  /** The cell that is chosen; the column -1 is for the whole row. */
  active?: [number, number] | null;
  legend: string;
  /** What numbers of the legend are round in: 1024 for bytes. */
  unit?: number;
  /** Whether the cells have their numbers on them, where these fit, or how they are written there. */
  numbers?: boolean | ((value: number) => string);
}

const LABELS = 11; // height of labels, in pixels

export function Grid(props: Props) {
  const { rows, columns, values, label, rowTitle, columnTitle, colour, log = false, detail, mark, onCell, active, legend, numbers = false } = props;
  const format = props.format ?? shortNumber;
  const svg = useRef<SVGSVGElement>(null);
  const [at, setAt] = useState<[number, number] | null>(null);
  const [keys, setKeys] = useState(false);
  const [low, high] = props.range ?? rangeOf(values, log);
  const [outer, width] = useWidth<HTMLDivElement>();
  const side = { left: Math.min(220, 12 + 6.4 * Math.max(...rows.map((r) => r.length), 1)) + (rowTitle ? 18 : 0), top: 8, bottom: columnTitle ? 36 : 22 };
  const cell = { w: Math.max(3, Math.min(numbers ? 64 : 44, (width - side.left - 8) / columns.length)), h: Math.max(5, Math.min(26, 640 / rows.length)) };
  if (cell.w > 4) cell.w = Math.floor(cell.w); // else seams show between cells
  if (cell.h > 5) cell.h = Math.floor(cell.h);
  const box = { w: side.left + cell.w * columns.length + 8, h: side.top + cell.h * rows.length + side.bottom };
  const gap = Math.min(cell.w, cell.h) > 8 ? 1 : 0;
  const share = (value: number) => {
    if (high <= low) return 0.5;
    const found = log ? (Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low)) : (value - low) / (high - low);
    return Math.min(1, Math.max(0, found));
  };
  const shown = (value: number) => Number.isFinite(value) && (!log || value > 0);
  const found = (event: MouseEvent): [number, number] | null => {
    const area = svg.current!.getBoundingClientRect();
    const scale = box.w / area.width;
    const column = Math.floor(((event.clientX - area.left) * scale - side.left) / cell.w);
    const row = Math.floor(((event.clientY - area.top) * scale - side.top) / cell.h);
    return row >= 0 && row < rows.length && column >= 0 && column < columns.length ? [row, column] : null;
  };
  const onKey = (event: KeyboardEvent) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const [row, column] = at ?? active ?? [0, 0];
    if (step) {
      event.preventDefault();
      setKeys(true);
      setAt([clamp(row + step[0]!, rows.length), clamp(column + step[1]!, columns.length)]);
    } else if ((event.key === "Enter" || event.key === " ") && onCell) {
      event.preventDefault();
      onCell(row, column);
    }
  };
  const every = (count: number, size: number, room: number) => Math.max(1, Math.ceil(room / size), Math.ceil(count / 400));
  const rowStep = every(rows.length, cell.h, LABELS + 2);
  const columnStep = every(columns.length, cell.w, 8 + 6.2 * Math.max(...columns.map((c) => c.length), 1));
  const room = Math.max(8, Math.floor((side.left - (rowTitle ? 24 : 6)) / 6.7)); // characters of a row's label: its end tells rows apart
  const scale = svg.current ? svg.current.getBoundingClientRect().width / box.w : 1;
  const beyond = !!props.range && Array.from(values).some((value) => value < low || value > high);
  // cells that are nearly alike have one quiet colour; numbers stand in the cells if they are asked for and fit
  const quiet = alike(values);
  const texts = numbers || quiet ? Array.from(values, (value) => (shown(value) ? (typeof numbers === "function" ? numbers(value) : format(value)) : "")) : [];
  const longest = texts.reduce((n, text) => Math.max(n, text.length), 0);
  const written = longest > 0 && cell.w > 6.2 * longest + 4 && cell.h > LABELS + 2;
  // going over the cells draws none of them anew
  const cells = useMemo(() => {
    const cells = [];
    for (let r = 0; r < rows.length; r += 1) {
      for (let c = 0; c < columns.length; c += 1) {
        const value = values[r * columns.length + c]!;
        cells.push(
          <rect
            key={r * columns.length + c}
            class={shown(value) ? undefined : "grid-none"}
            x={side.left + c * cell.w}
            y={side.top + r * cell.h}
            width={cell.w - gap}
            height={cell.h - gap}
            fill={!shown(value) ? undefined : quiet ? "var(--alike)" : colour(share(value))}
          />,
        );
        if (written && shown(value) && !mark?.(r, c)) {
          cells.push(
            <text key={`n${r * columns.length + c}`} class="grid-number" style={quiet ? undefined : { fill: inkOn(colour(share(value))) }} x={side.left + (c + 0.5) * cell.w} y={side.top + (r + 0.5) * cell.h} text-anchor="middle" dominant-baseline="central">
              {texts[r * columns.length + c]}
            </text>,
          );
        }
        const sign = mark?.(r, c);
        if (sign) {
          cells.push(
            <text key={`m${r * columns.length + c}`} class={`grid-mark${shown(value) ? "" : " grid-mark-none"}`} x={side.left + (c + 0.5) * cell.w} y={side.top + (r + 0.5) * cell.h} text-anchor="middle" dominant-baseline="central">
              {sign}
            </text>,
          );
        }
      }
    }
    return cells;
  }, [values, rows, columns, low, high, box.w, box.h, log]);
  const frame = (pair: [number, number] | null | undefined, kind: string) =>
    pair && <rect class={kind} x={side.left + Math.max(0, pair[1]) * cell.w - 0.5} y={side.top + pair[0] * cell.h - 0.5} width={(pair[1] < 0 ? columns.length : 1) * cell.w - gap + 1} height={cell.h - gap + 1} />;
  return (
    <div class="grid" ref={outer}>
      <div class="grid-box">
        <svg
          ref={svg}
          class={`picture${onCell ? " grid-click" : ""}`}
          viewBox={`0 0 ${box.w} ${box.h}`}
          width={box.w}
          height={box.h}
          role="application"
          aria-label={`${label}. ${rows.length} by ${columns.length} cells${low <= high ? `, ${format(low)} to ${format(high)}` : ""}. Arrow keys go from cell to cell.`}
          tabIndex={0}
          onKeyDown={onKey}
          onMouseMove={(event) => {
            setKeys(false);
            setAt(found(event));
          }}
          onMouseLeave={() => setAt(null)}
          onBlur={() => setAt(null)}
          onClick={(event) => {
            const pair = found(event);
            if (pair) onCell?.(...pair);
          }}
        >
          {cells}
          {rows.map((text, n) => n % rowStep === 0 && (
            <text key={n} class="axis" x={side.left - 6} y={side.top + (n + 0.5) * cell.h} text-anchor="end" dominant-baseline="central">
              {text.length > room ? `…${text.slice(1 - room)}` : text}
            </text>
          ))}
          {columns.map((text, n) => n % columnStep === 0 && (
            <text key={n} class="axis" x={side.left + (n + 0.5) * cell.w} y={box.h - side.bottom + 14} text-anchor="middle">
              {text}
            </text>
          ))}
          {columnTitle && (
            <text class="axis" x={side.left + (cell.w * columns.length) / 2} y={box.h - 4} text-anchor="middle">
              {columnTitle}
            </text>
          )}
          {rowTitle && (
            <text class="axis" transform={`translate(11 ${side.top + (cell.h * rows.length) / 2}) rotate(-90)`} text-anchor="middle">
              {rowTitle}
            </text>
          )}
          {frame(active, "grid-active")}
          {frame(at, "grid-at")}
        </svg>
        {at && (
          <div class="tip" style={{ left: `${(side.left + (at[1] + 1) * cell.w) * scale + 6}px`, top: `${(side.top + (at[0] + 1) * cell.h) * scale + 4}px` }}>
            {detail(...at)}
          </div>
        )}
      </div>
      <span class="sr-only" aria-live="polite">
        {keys && at ? detail(...at) : ""}
      </span>
      {quiet ? (
        <p class="quiet grid-alike" data-legend>
          {legend}: {[...new Set([format(quiet[0]), format(quiet[1])])].join(" to ")}
        </p>
      ) : (
        <LegendOf {...{ low, high, log, colour, format, title: beyond ? `${legend}; beyond, the colour of the end` : legend, unit: props.unit }} />
      )}
    </div>
  );
}

const APART = 0.12; // of the bar of colours, between its numbers

/** What the colours between two values stand for: round numbers, not too near each other. */
export function LegendOf({ low, high, log = false, colour, format = shortNumber, title, unit = 1 }: LegendProps) {
  if (!Number.isFinite(low) || !Number.isFinite(high)) return null;
  const scale = unit > 1 && high > 0 ? unit ** Math.floor(Math.log(high) / Math.log(unit)) : 1;
  const round = high > low ? (log ? logTicks(low, high, 5) : roundMarks(low / scale, high / scale).map((n) => n * scale)) : [low];
  const share = (v: number) => (high <= low ? 0.5 : log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low));
  const marks = round.map((value) => ({ at: share(value), text: format(value) }));
  const apart = marks.reduce<typeof marks>((kept, one) => (kept.length && one.at - kept[kept.length - 1]!.at < APART ? kept : [...kept, one]), []);
  return <Legend title={title} colour={colour} marks={apart} />;
}

interface LegendProps {
  low: number;
  high: number;
  log?: boolean;
  colour(share: number): string;
  format?(value: number): string;
  title: string;
  unit?: number | undefined;
}

/** About four round numbers; more, if these are fewer than two besides 0. */
function roundMarks(low: number, high: number): number[] {
  const found = ticks(low, high, 4);
  return found.filter((n) => n !== 0).length > 1 ? found : ticks(low, high, 8);
}

const NEAR = 0.01;

/** Black or white, whichever is read better on a colour of a table. */
function inkOn(colour: string): string {
  const [r = 0, g = 0, b = 0] = (colour.match(/[\d.]+/g) ?? []).map(Number);
  return 0.299 * r + 0.587 * g + 0.114 * b > 130 ? "#111" : "#fff";
}

/** The smallest and the largest value, if they are so near each other that colours would say nothing. */
function alike(values: ArrayLike<number>): [number, number] | null {
  const [low, high] = rangeOf(values, false);
  return low <= high && high - low <= NEAR * Math.max(Math.abs(low), Math.abs(high)) ? [low, high] : null;
}

function rangeOf(values: ArrayLike<number>, log: boolean): [number, number] {
  let low = Infinity, high = -Infinity;
  for (let n = 0; n < values.length; n += 1) {
    const value = values[n]!;
    if (!Number.isFinite(value) || (log && value <= 0)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
}

function clamp(n: number, count: number): number {
  return Math.min(count - 1, Math.max(0, n));
}
