// A treemap of two levels: groups, and what they consist of. A table beside it says the same to screen readers.

import { useState } from "preact/hooks";
import { useWidth } from "./width";
import { squarified, type Rect } from "./squares";
import { shownName } from "./text";
import "./treemap.css";

export interface Leaf {
  key: string;
  label: string;
  value: number;
  /** Lines of the tooltip. */
  detail: string;
}

export interface Branch {
  key: string;
  label: string;
  /** The size, as text beside the label. */
  size: string;
  /** Class of the colour: "role-mlp". */
  colour: string;
  leaves: Leaf[];
}

interface Props {
  branches: Branch[];
  label: string;
  height?: number;
  onLeaf?(key: string): void;
  active?: string;
}

const HEAD = 18;
const LETTER = 7; // width of a letter of the labels, in pixels

export function Treemap({ branches, label, height = 380, onLeaf, active }: Props) {
  const [box_, width] = useWidth<HTMLDivElement>();
  const [tip, setTip] = useState<{ text: string; left: number; top: number } | null>(null);
  const sum = (branch: Branch) => branch.leaves.reduce((n, leaf) => n + leaf.value, 0);
  const sorted = branches.filter((branch) => sum(branch) > 0).sort((a, b) => sum(b) - sum(a));
  const outer = squarified(sorted.map(sum), { x: 0, y: 0, w: width, h: height });
  return (
    <div class="treemap" ref={box_} onMouseLeave={() => setTip(null)}>
      <svg class="picture" viewBox={`0 0 ${width} ${height}`} role="img" aria-label={label}>
        {sorted.map((branch, n) => {
          const box = shrunk(outer[n]!, 1.5);
          const head = box.h > 44 && box.w > 50 ? HEAD : 0;
          const leaves = branch.leaves.filter((leaf) => leaf.value > 0).sort((a, b) => b.value - a.value);
          const inner = squarified(leaves.map((leaf) => leaf.value), { x: box.x, y: box.y + head, w: box.w, h: box.h - head });
          return (
            <g key={branch.key} class={branch.colour}>
              {head > 0 && (
                <text class="treemap-head" x={box.x + 4} y={box.y + 13}>
                  {heading(branch, box.w - 8)}
                </text>
              )}
              {leaves.map((leaf, m) => {
                const { x, y, w, h } = shrunk(inner[m]!, 0.5);
                const text = w > 30 && h > 15 ? fitting(shownName(leaf.label), w - 8) : "";
                return (
                  <g
                    key={leaf.key}
                    class={`treemap-leaf${leaf.key === active ? " active" : ""}${onLeaf ? " treemap-click" : ""}`}
                    onClick={() => onLeaf?.(leaf.key)}
                    onMouseMove={(event) => {
                      const area = event.currentTarget.ownerSVGElement!.getBoundingClientRect();
                      const left = event.clientX - area.left;
                      setTip({ text: leaf.detail, left: left > area.width / 2 ? left - 260 : left + 14, top: event.clientY - area.top + 14 });
                    }}
                  >
                    <rect x={x} y={y} width={w} height={h} rx="2" />
                    {text && (
                      <text x={x + 4} y={y + 12}>
                        {text}
                      </text>
                    )}
                  </g>
                );
              })}
            </g>
          );
        })}
      </svg>
      {tip && (
        <div class="tip" style={{ left: `${tip.left}px`, top: `${tip.top}px` }}>
          {tip.text}
        </div>
      )}
    </div>
  );
}

function shrunk({ x, y, w, h }: Rect, by: number): Rect {
  return { x: x + by, y: y + by, w: Math.max(0, w - 2 * by), h: Math.max(0, h - 2 * by) };
}

function heading({ label, size }: Branch, width: number): string {
  const most = Math.floor(width / (LETTER + 0.6));
  const both = `${label}  ${size}`;
  return both.length <= most ? both : label.length <= most ? label : `${label.slice(0, Math.max(1, most - 1))}…`;
}

/** The text, or as many of its last parts as fit: they tell names apart. What most names end with is left out first. */
function fitting(text: string, width: number): string {
  const most = Math.floor(width / LETTER);
  let parts = text.split(".");
  if (text.length > most && parts.length > 1 && parts[parts.length - 1] === "weight") parts = parts.slice(0, -1);
  while (parts.length > 1 && parts.join(".").length > most) parts = parts.slice(1);
  const short = parts.join(".");
  return short.length <= most ? short : most >= 4 ? `${short.slice(0, most - 1)}…` : "";
}
