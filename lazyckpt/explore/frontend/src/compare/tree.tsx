// The tensors of a comparison as a tree: a row for each kind, with its layers folded, coloured by relative difference.

import type { CSSProperties } from "preact";
import { useRef } from "preact/hooks";
import { shortNumber } from "../ui/axis";
import { Ending } from "../ui/ending";
import { VirtualList } from "../ui/virtual";
import { cosineText, countText, linesOf, type Difference, type Fold, type Line } from "./fold";

interface Props {
  kinds: string[];
  folds: Map<number, Fold>;
  open: ReadonlySet<number>;
  onOpen(kind: number, open: boolean): void;
  active: string | undefined;
  onName(row: Difference): void;
  colour(relative: number): string;
}

const ROW = 26;

export function DifferenceTree({ kinds, folds, open, onOpen, active, onName, colour }: Props) {
  const lines = linesOf(folds, open);
  const box = useRef<HTMLDivElement>(null);
  const act = (line: Line) => {
    if ("row" in line) onName(line.row);
    else if (line.single) onName(line.fold.rows[0]!);
    else onOpen(line.kind, !line.open);
  };
  const onKey = (event: KeyboardEvent, index: number) => {
    const line = lines[index]!;
    const focus = (n: number) => box.current?.querySelector<HTMLElement>(`[data-line="${n}"]`)?.focus();
    if (event.key === "Enter" || event.key === " ") act(line);
    else if (event.key === "ArrowDown") focus(index + 1);
    else if (event.key === "ArrowUp") focus(index - 1);
    else if (event.key === "ArrowRight" && "kind" in line && !line.single) onOpen(line.kind, true);
    else if (event.key === "ArrowLeft") {
      if ("kind" in line) onOpen(line.kind, false);
      else focus(lines.findIndex((one) => "kind" in one && one.kind === line.row.kind));
    } else return;
    event.preventDefault();
  };
  const draw = (index: number, style: CSSProperties) => {
    const line = lines[index]!;
    const row = "row" in line ? line.row : line.single ? line.fold.rows[0]! : undefined;
    const below = "row" in line;
    const fold = below ? undefined : line.fold;
    const relative = (row ?? fold!.worst).relative;
    const text = row ? row.name : kinds[(line as { kind: number }).kind]!;
    return (
      <div
        key={below ? line.row.name : `kind ${line.kind}`}
        data-line={index}
        role="treeitem"
        tabIndex={index === 0 ? 0 : -1}
        aria-level={below ? 2 : 1}
        aria-expanded={below || line.single ? undefined : line.open}
        aria-selected={row !== undefined && row.name === active}
        class={`compare-line${row && row.name === active ? " active" : ""}`}
        style={style}
        onClick={() => act(line)}
        onKeyDown={(event) => onKey(event, index)}
      >
        <span class={`compare-name mono${below ? " below" : ""}`}>
          <span class="compare-fold" aria-hidden="true">
            {below || line.single ? "" : line.open ? "▾" : "▸"}
          </span>
          <span class="compare-swatch" style={{ background: relative ? colour(relative) : undefined }} aria-hidden="true" />
          <Ending text={text} />
        </span>
        <span class="number">{relativeText(row ?? fold!.worst)}</span>
        <span class="number">{cosineText(fold ? fold.cosine : row!.cosine)}</span>
        <span class="number">{fold && fold.max_abs !== null ? shortNumber(fold.max_abs) : row && row.max_abs !== null ? shortNumber(row.max_abs) : ""}</span>
        <span class="quiet">{row ? kindText(row) : countText(fold!)}</span>
      </div>
    );
  };
  const head = (
    <div class="compare-line compare-head" role="presentation">
      <span>tensor</span>
      <span class="number" title="the norm of the difference divided by the norm in A; of several tensors the largest">
        relative
      </span>
      <span class="number" title="of several tensors the smallest">
        cosine
      </span>
      <span class="number">largest |a − b|</span>
      <span>what differs</span>
    </div>
  );
  return (
    <div ref={box}>
      <VirtualList
        role="tree"
        aria-label="tensors by kind, those that differ most first"
        class="table-box"
        style={{ height: `${Math.min(420, (lines.length + 1) * ROW + 4)}px` }}
        count={lines.length}
        rowHeight={ROW}
        row={draw}
        head={head}
      />
    </div>
  );
}

export function relativeText({ relative, norm_a, norm_b }: Difference): string {
  if (relative !== null) return relative === 0 ? "0" : relative < 1e-3 ? relative.toExponential(2) : relative.toFixed(4);
  return norm_a === 0 && norm_b ? "from 0" : "";
}

export function kindText(row: Difference): string {
  if (row.status === "unreadable") return `cannot be read: ${row.error ?? ""}`;
  if (row.status === "only in a" || row.status === "only in b") return `${row.status === "only in a" ? "only in A" : "only in B"}: ${row.a ?? row.b}`;
  if (row.status === "equal") return `equal, ${row.a}`;
  return row.a === row.b ? (row.a ?? "") : `${row.a} and ${row.b}`;
}
