// Line charts and sparklines.

import { useRef, useState } from "preact/hooks";
import { logTicks, shortNumber, ticks, tickText, wholeText } from "./axis";
import { shownName } from "./text";
import { useWidth } from "./width";
import "./line.css";

export interface Series {
  name: string;
  x: ArrayLike<number>;
  /** NaN leaves a gap. */
  y: ArrayLike<number>;
}

interface Props {
  series: Series[];
  /** Said to screen readers. */
  label: string;
  xLabel: string;
  yLabel: string;
  log?: boolean;
  height?: number;
  /** A vertical line, such as the chosen step. */
  mark?: number;
  onPoint?(series: Series, index: number): void;
  /** A colour for each series, in place of the eight that repeat. */
  colours?: string[];
  /** Whether the names of the series stand below. */
  legend?: boolean;
}

const SIDE = { left: 64, right: 14, top: 10, bottom: 38 };
export const LINE_COLOURS = 8; // classes line-0 to line-7; more series repeat them with dashes

export function LineChart({ series, label, xLabel, yLabel, log = false, height = 280, mark, onPoint, colours, legend = true }: Props) {
  const [near, setNear] = useState<{ series: Series; index: number; left: number; top: number } | null>(null);
  const svg = useRef<SVGSVGElement>(null);
  const [box, width] = useWidth<HTMLDivElement>();
  const good = (y: number) => Number.isFinite(y) && (!log || y > 0);
  let xLow = Infinity, xHigh = -Infinity, yLow = Infinity, yHigh = -Infinity;
  for (const { x, y } of series) {
    for (let n = 0; n < x.length; n += 1) {
      if (!good(y[n]!)) continue;
      xLow = Math.min(xLow, x[n]!);
      xHigh = Math.max(xHigh, x[n]!);
      yLow = Math.min(yLow, y[n]!);
      yHigh = Math.max(yHigh, y[n]!);
    }
  }
  if (!Number.isFinite(xLow)) return <p class="quiet">There are no numbers to draw.</p>;
  const whole = series.every(({ x }) => Array.from(x).every(Number.isInteger)); // steps, layers, places in an order
  const xText = whole ? wholeText : shortNumber;
  const many = series.length === 1 ? "One line" : `${series.length} lines`;
  const said = `${label}. ${many}, ${xLabel} ${xText(xLow)} to ${xText(xHigh)}, values ${shortNumber(yLow)} to ${shortNumber(yHigh)}.`;
  if (xLow === xHigh) [xLow, xHigh] = [xLow - 0.5, xHigh + 0.5];
  if (log) {
    yLow /= 1.15;
    yHigh *= 1.15;
  } else {
    const room = (yHigh - yLow || Math.abs(yHigh) || 1) * 0.06;
    yLow = yLow >= 0 && yLow < (yHigh - yLow) * 0.5 ? 0 : yLow - room;
    yHigh += room;
  }
  const inner = { w: width - SIDE.left - SIDE.right, h: height - SIDE.top - SIDE.bottom };
  const px = (x: number) => SIDE.left + ((x - xLow) / (xHigh - xLow)) * inner.w;
  const share = (y: number) =>
    log ? (Math.log(y) - Math.log(yLow)) / (Math.log(yHigh) - Math.log(yLow)) : (y - yLow) / (yHigh - yLow);
  const py = (y: number) => SIDE.top + (1 - share(y)) * inner.h;
  const path = ({ x, y }: Series) => {
    let text = "", pen = false;
    for (let n = 0; n < x.length; n += 1) {
      if (!good(y[n]!)) {
        pen = false;
        continue;
      }
      text += `${pen ? "L" : "M"}${px(x[n]!).toFixed(1)},${py(y[n]!).toFixed(1)}`;
      pen = true;
    }
    return text;
  };
  const seek = (event: MouseEvent) => {
    const area = svg.current!.getBoundingClientRect();
    const scale = width / area.width;
    const at = { x: (event.clientX - area.left) * scale, y: (event.clientY - area.top) * scale };
    let best = 900, found: typeof near = null;
    for (const one of series) {
      for (let n = 0; n < one.x.length; n += 1) {
        if (!good(one.y[n]!)) continue;
        const left = px(one.x[n]!), top = py(one.y[n]!);
        const distance = (left - at.x) ** 2 + (top - at.y) ** 2;
        if (distance < best) [best, found] = [distance, { series: one, index: n, left: left / scale, top: top / scale }];
      }
    }
    setNear(found);
  };
  const yTicks = log ? logTicks(yLow, yHigh) : ticks(yLow, yHigh);
  const yTexts = tickText(yTicks);
  const xTicks = ticks(xLow, xHigh, Math.max(3, Math.min(8, Math.floor(inner.w / 60))), whole);
  const few = series.reduce((n, { x }) => n + x.length, 0) <= 400;
  return (
    <div class="chart" ref={box}>
      <svg
        ref={svg}
        class={`picture${onPoint ? " chart-click" : ""}`}
        viewBox={`0 0 ${width} ${height}`}
        role="img"
        aria-label={said}
        onMouseMove={seek}
        onMouseLeave={() => setNear(null)}
        onClick={() => near && onPoint?.(near.series, near.index)}
      >
        {yTicks.map((y, n) => (
          <g key={y}>
            <line class="chart-grid" x1={SIDE.left} x2={width - SIDE.right} y1={py(y)} y2={py(y)} />
            <text class="axis" x={SIDE.left - 8} y={py(y)} text-anchor="end" dominant-baseline="middle">
              {yTexts[n]}
            </text>
          </g>
        ))}
        {xTicks.map((x) => (
          <text key={x} class="axis" x={Math.min(px(x), width - 3.3 * xText(x).length)} y={height - SIDE.bottom + 16} text-anchor="middle">
            {xText(x)}
          </text>
        ))}
        <text class="axis" x={SIDE.left + inner.w / 2} y={height - 4} text-anchor="middle">
          {xLabel}
        </text>
        <text class="axis" transform={`translate(12 ${SIDE.top + inner.h / 2}) rotate(-90)`} text-anchor="middle">
          {yLabel}
        </text>
        {mark !== undefined && mark >= xLow && mark <= xHigh && (
          <line class="chart-mark" x1={px(mark)} x2={px(mark)} y1={SIDE.top} y2={SIDE.top + inner.h} />
        )}
        {series.map((one, n) => (
          <path
            key={one.name}
            class={`chart-line line-${n % LINE_COLOURS}${n >= LINE_COLOURS && !colours ? " line-more" : ""}${near && near.series !== one ? " chart-faded" : ""}`}
            style={colours && { stroke: colours[n] }}
            d={path(one)}
          />
        ))}
        {few &&
          series.map((one, n) =>
            Array.from(one.x, (x, i) => good(one.y[i]!) && <circle key={`${n}.${i}`} class={`chart-dot dot-${n % LINE_COLOURS}`} cx={px(x)} cy={py(one.y[i]!)} r={2} style={colours && { fill: colours[n] }} />),
          )}
        {near && <circle class="chart-near" cx={px(near.series.x[near.index]!)} cy={py(near.series.y[near.index]!)} r={4.5} />}
      </svg>
      {near && (
        <div class="tip" style={{ left: `${near.left + 10}px`, top: `${near.top + 10}px` }}>
          {shownName(near.series.name)}
          {`\n${xLabel} ${xText(near.series.x[near.index]!)}: ${shortNumber(near.series.y[near.index]!)}`}
        </div>
      )}
      {legend && series.length > 1 && (
        <ul class="legend" data-legend>
          {series.map(({ name }, n) => (
            <li key={name}>
              <svg width="18" height="10" aria-hidden="true">
                <path class={`chart-line line-${n % LINE_COLOURS}${n >= LINE_COLOURS && !colours ? " line-more" : ""}`} style={colours && { stroke: colours[n] }} d="M0,5H18" />
              </svg>
              {shownName(name)}
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

interface SparkProps {
  values: ArrayLike<number>;
  width?: number;
  height?: number;
  /** What the values are, said to screen readers and as a tooltip. */
  title: string;
}

/** A small curve without axes. NaN leaves a gap. */
export function Sparkline({ values, width = 96, height = 18, title }: SparkProps) {
  let low = Infinity, high = -Infinity;
  for (let n = 0; n < values.length; n += 1) {
    if (!Number.isFinite(values[n]!)) continue;
    low = Math.min(low, values[n]!);
    high = Math.max(high, values[n]!);
  }
  if (!Number.isFinite(low)) return <span class="spark" style={{ width: `${width}px` }} />;
  const flat = high - low < Math.abs(high) * 1e-9;
  const step = values.length > 1 ? (width - 4) / (values.length - 1) : 0;
  let text = "", pen = false;
  for (let n = 0; n < values.length; n += 1) {
    const value = values[n]!;
    if (!Number.isFinite(value)) {
      pen = false;
      continue;
    }
    const y = flat ? height / 2 : height - 2 - ((value - low) / (high - low)) * (height - 4);
    text += `${pen ? "L" : "M"}${(2 + n * step).toFixed(1)},${y.toFixed(1)}`;
    pen = true;
  }
  const range = flat ? shortNumber(low) : `${shortNumber(low)} to ${shortNumber(high)}`;
  return (
    <svg class="spark" width={width} height={height} role="img" aria-label={`${title}: ${range}`}>
      <title>{`${title}: ${range}`}</title>
      <path class="spark-line" d={text} />
    </svg>
  );
}
