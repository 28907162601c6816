// A table that is sorted by a click on a head, draws only the rows in view, and is saved as CSV.

import type { ComponentChildren, CSSProperties } from "preact";
import { useMemo, useRef, useState } from "preact/hooks";
import { useParam } from "../context";
import { saveCsv, type Cell } from "./save";
import { counted, grouped } from "./text";
import { VirtualList } from "./virtual";
import "./table.css";

const GAP = 12; // px between columns, and at either end

export interface Column<T> {
  /** Identifies the column, also in links. */
  key: string;
  title: string;
  /** What the column is sorted by and what the CSV has. */
  value(row: T): Cell;
  /** What is drawn; by default the value, numbers with separators. */
  cell?(row: T): ComponentChildren;
  /** A width of CSS grid, such as "1fr" or "90px". */
  width?: string;
  /** Numbers stand at the right side. */
  number?: boolean;
  /** Whether the column only draws another one; the CSV leaves it out. */
  picture?: boolean;
  /** Explains the column. */
  hint?: string;
}

export interface Sort {
  key: string;
  down: boolean;
}

interface Props<T> {
  /** Identifies the table on its page, in links: they say how it is sorted. */
  id: string;
  columns: Column<T>[];
  rows: readonly T[];
  /** Says what the table lists, for screen readers. */
  caption: string;
  /** The name of the CSV; by default the caption. */
  file?: string;
  rowKey(row: T): string | number;
  /** The order at first; null keeps that of the rows. */
  sort?: Sort | null;
  onRow?(row: T): void;
  active?: string | number;
  /** The largest height in pixels. */
  height?: number;
  /** Stands beside the button that saves. */
  note?: ComponentChildren;
}

const ROW = 28;

export function DataTable<T>(props: Props<T>) {
  const { columns, rows, caption, rowKey, onRow, active, height = 480, note } = props;
  const [said, say] = useParam(`sort.${props.id}`, sortText(props.sort ?? null));
  const sort = sortOf(said);
  const sorted = useMemo(() => sortedBy(rows, columns, sort), [rows, columns, sort?.key, sort?.down]);
  const told = columns.filter(({ picture }) => !picture);
  const widths = columns.map((c) => c.width ?? (c.number ? "110px" : "minmax(140px,1fr)"));
  const least = widths.reduce((sum, width) => sum + Number(/^(?:minmax\()?(\d+)px/.exec(width)?.[1] ?? 80) + GAP, GAP);
  const grid = { gridTemplateColumns: widths.join(" "), minWidth: `${least}px` }; // the same for all rows, whatever they hold
  const head = (
    <div class="table-row table-head" role="row" style={grid}>
      {columns.map((column) => {
        const by = sort?.key === column.key;
        return (
          <div
            key={column.key}
            role="columnheader"
            class={column.number ? "number" : undefined}
            aria-sort={by ? (sort.down ? "descending" : "ascending") : "none"}
          >
            <button
              type="button"
              title={column.hint ?? `sort by ${column.title}`}
              onClick={() => say(sortText(nextSort(sort, column)))}
            >
              {column.title}
              <span class="table-arrow" aria-hidden="true">
                {by ? (sort.down ? "▾" : "▴") : ""}
              </span>
            </button>
          </div>
        );
      })}
    </div>
  );
  const box = useRef<HTMLDivElement>(null);
  const [at, setAt] = useState(0); // the row that the key Tab reaches; arrow keys go to the others
  const onKey = (event: KeyboardEvent) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !onRow) return;
    const rows = [...(box.current?.querySelectorAll<HTMLElement>("[role=row][tabindex]") ?? [])];
    const next = rows[rows.indexOf(event.target as HTMLElement) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  };
  const draw = (index: number, style: CSSProperties) => {
    const row = sorted[index]!;
    const key = rowKey(row);
    return (
      <div
        key={key}
        role="row"
        aria-rowindex={index + 2}
        class={`table-row${onRow ? " table-click" : ""}${key === active ? " active" : ""}`}
        style={{ ...grid, ...style }}
        onClick={onRow && (() => onRow(row))}
        onKeyDown={onRow && ((event) => event.key === "Enter" && event.target === event.currentTarget && onRow(row))}
        tabIndex={onRow ? (index === Math.min(at, sorted.length - 1) ? 0 : -1) : undefined}
        onFocus={onRow && (() => setAt(index))}
      >
        {columns.map((column) => {
          const value = column.cell ? column.cell(row) : shown(column.value(row));
          const title = typeof value === "string" ? value : undefined;
          return (
            <div key={column.key} role="cell" class={column.number ? "number" : undefined} title={title}>
              {value}
            </div>
          );
        })}
      </div>
    );
  };
  return (
    <div class="table" ref={box} onKeyDown={onKey}>
      <div class="table-tools">
        <span class="quiet">{note ?? counted(rows.length, "row")}</span>
        <button type="button" class="small" onClick={() => saveCsv(props.file ?? caption, told.map((c) => c.title), csvRows(sorted, told))}>
          CSV
        </button>
      </div>
      <VirtualList
        role="table"
        aria-label={caption}
        aria-rowcount={rows.length + 1}
        aria-colcount={columns.length}
        tabIndex={0}
        class="table-box"
        style={{ height: `${Math.min(height, (rows.length + 1) * ROW + 3)}px` }}
        count={sorted.length}
        rowHeight={ROW}
        row={draw}
        head={head}
      />
    </div>
  );
}

function* csvRows<T>(rows: readonly T[], columns: Column<T>[]): Iterable<Cell[]> {
  for (const row of rows) yield columns.map((column) => column.value(row));
}

function shown(value: Cell): string {
  if (value === null || value === undefined) return "";
  return typeof value === "number" && Number.isInteger(value) ? grouped(value) : String(value);
}

/** An order as text for links, and back. */
export function sortText(sort: Sort | null): string {
  return sort ? `${sort.key}:${sort.down ? "down" : "up"}` : "none";
}

export function sortOf(text: string): Sort | null {
  const [, key, way] = /^(.*):(up|down)$/s.exec(text) ?? [];
  return key === undefined ? null : { key, down: way === "down" };
}

/** The order that a click on a head asks for: numbers largest first, then the other way, then as it was. */
export function nextSort<T>(sort: Sort | null, column: Column<T>): Sort | null {
  const first = !!column.number;
  if (sort?.key !== column.key) return { key: column.key, down: first };
  return sort.down === first ? { key: column.key, down: !first } : null;
}

/** A number that is given as text, such as "inf" or "1.5e-300"; of a complex one the real part. */
function numberOf(value: Cell): Cell {
  if (typeof value !== "string") return value;
  const odd: Record<string, number> = { inf: Infinity, "-inf": -Infinity, True: 1, False: 0 };
  return odd[value] ?? parseFloat(value);
}

/** Rows in the order of a column; rows without a value last, rows with equal values as they were. */
export function sortedBy<T>(rows: readonly T[], columns: Column<T>[], sort: Sort | null): readonly T[] {
  const column = sort && columns.find((one) => one.key === sort.key);
  if (!column) return rows;
  const keys = rows.map((row) => (column.number ? numberOf(column.value(row)) : column.value(row)));
  const order = rows.map((_, n) => n);
  const sign = sort.down ? -1 : 1;
  order.sort((a, b) => {
    const x = keys[a], y = keys[b];
    const noX = x === null || x === undefined || Number.isNaN(x), noY = y === null || y === undefined || Number.isNaN(y);
    if (noX || noY) return noX && noY ? a - b : noX ? 1 : -1;
    return (x < y ? -1 : x > y ? 1 : 0) * sign || a - b;
  });
  return order.map((n) => rows[n]!);
}
