// A histogram: bars for bins, with counts on a linear or logarithmic axis.

import { useMemo, useRef, useState } from "preact/hooks";
import { logTicks, shortNumber, ticks } from "./axis";
import { grouped } from "./text";
import { useWidth } from "./width";
import "./histogram.css";

interface Props {
  edges: ArrayLike<number>;
  counts: ArrayLike<number>;
  /** Said to screen readers. */
  label: string;
  xLabel: string;
  yLabel: string;
  /** Whether counts are drawn on a logarithmic axis. */
  log?: boolean;
  /** Whether each bin is equally wide, whatever its edges are. */
  even?: boolean;
  /** The text below a bin, instead of numbers along the axis. */
  names?: string[];
  height?: number;
}

const SIDE = { left: 62, right: 12, top: 10, bottom: 38 };

export function Histogram({ edges, counts, label, xLabel, yLabel, log = false, even = false, names, height = 240 }: Props) {
  const svg = useRef<SVGSVGElement>(null);
  const [near, setNear] = useState(-1);
  const [box, width] = useWidth<HTMLDivElement>();
  const inner = { w: width - SIDE.left - SIDE.right, h: height - SIDE.top - SIDE.bottom };
  const last = counts.length;
  const most = useMemo(() => Array.from(counts).reduce((a, b) => Math.max(a, b), 0), [counts]);
  const [low, high] = even ? [0, last] : [edges[0]!, edges[last]!];
  const px = (x: number) => SIDE.left + ((x - low) / (high - low || 1)) * inner.w;
  const edge = (n: number) => px(even ? n : edges[n]!);
  const least = 0.5; // of a logarithmic axis: a bin of one element is seen
  const share = (n: number) => (!n ? 0 : log ? Math.log(n / least) / Math.log((most || 1) / least) : n / (most || 1));
  const py = (n: number) => SIDE.top + (1 - share(n)) * inner.h;
  const path = useMemo(() => {
    const parts: string[] = [];
    for (let n = 0; n < last; n += 1) {
      if (!counts[n]) continue;
      const [a, b] = [edge(n), edge(n + 1)];
      const gap = b - a > 4 ? 0.5 : 0;
      parts.push(`M${(a + gap).toFixed(2)},${SIDE.top + inner.h}V${py(counts[n]!).toFixed(2)}H${(b - gap).toFixed(2)}V${SIDE.top + inner.h}Z`);
    }
    return parts.join("");
  }, [counts, edges, log, even, width, height]);
  const seek = (event: MouseEvent) => {
    const area = svg.current!.getBoundingClientRect();
    const x = ((event.clientX - area.left) / area.width) * width;
    let found = -1;
    for (let n = 0; n < last; n += 1) if (x >= edge(n) && x < edge(n + 1)) found = n;
    setNear(found);
  };
  const xTicks = even ? evenTicks(last, names) : ticks(low, high, Math.max(4, Math.floor(inner.w / 70)));
  const name = (n: number) => names?.[n] ?? `${shortNumber(edges[n]!)} to ${shortNumber(edges[n + 1]!)}`;
  const tickText = (x: number) => (even ? (names ? names[x] : shortNumber(edges[x]!)) : shortNumber(x));
  return (
    <div class="chart" ref={box}>
      <svg
        ref={svg}
        class="picture"
        viewBox={`0 0 ${width} ${height}`}
        role="img"
        aria-label={label}
        onMouseMove={seek}
        onMouseLeave={() => setNear(-1)}
      >
        {(log ? [1, ...logTicks(1, Math.max(10, most))] : ticks(0, most || 1, 4)).map((y) => (
          <g key={y}>
            <line class="chart-grid" x1={SIDE.left} x2={width - SIDE.right} y1={py(y)} y2={py(y)} />
            <text class="axis" x={SIDE.left - 8} y={py(y)} text-anchor="end" dominant-baseline="middle">
              {shortNumber(y)}
            </text>
          </g>
        ))}
        <path class="histogram-bars" d={path} />
        {near >= 0 && (
          <rect class="histogram-near" x={edge(near)} width={Math.max(1, edge(near + 1) - edge(near))} y={SIDE.top} height={inner.h} />
        )}
        <line class="histogram-base" x1={SIDE.left} x2={width - SIDE.right} y1={SIDE.top + inner.h} y2={SIDE.top + inner.h} />
        {xTicks.map((x) => (
          <text key={x} class="axis" x={even && names ? px(x + 0.5) : px(x)} y={height - SIDE.bottom + 16} text-anchor="middle">
            {tickText(x)}
          </text>
        ))}
        <text class="axis" x={SIDE.left + inner.w / 2} y={height - 4} text-anchor="middle">
          {xLabel}
        </text>
        <text class="axis" transform={`translate(12 ${SIDE.top + inner.h / 2}) rotate(-90)`} text-anchor="middle">
          {yLabel}
        </text>
      </svg>
      {near >= 0 && (
        <div class="tip" style={{ left: `${Math.min(edge(near) / width, 0.7) * 100}%`, top: "4px" }}>
          {`${name(near)}\n${grouped(counts[near]!)}`}
        </div>
      )}
    </div>
  );
}

function evenTicks(count: number, names?: string[]): number[] {
  const step = Math.max(1, Math.ceil(count / (names ? 9 : 8)));
  const found: number[] = [];
  for (let n = 0; n <= count - (names ? 1 : 0); n += step) found.push(n);
  return found;
}
