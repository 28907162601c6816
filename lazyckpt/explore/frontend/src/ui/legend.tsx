// What colours stand for: a bar of them with numbers.

import "./legend.css";

const STRIPES = 130; // of a bar
const WIDTH = 260;

interface Props {
  /** What the numbers are, with their unit. */
  title: string;
  /** The colour of a share from 0 to 1, as CSS. */
  colour(share: number): string;
  /** Numbers and where they stand: shares from 0 to 1. */
  marks: { at: number; text: string }[];
}

/** A bar of colours, as an svg: a saved picture has a copy of it. */
export function Legend({ title, colour, marks }: Props) {
  const said = marks.length > 1 ? `colours from ${marks[0]!.text} to ${marks[marks.length - 1]!.text}` : `colours around ${marks[0]?.text}`;
  return (
    <div class="colour-legend" data-legend>
      <span class="quiet">{title}</span>
      <svg width={WIDTH} height={27} viewBox={`0 0 ${WIDTH} 27`} role="img" aria-label={said}>
        {Array.from({ length: STRIPES }, (_, n) => (
          // each reaches below the next one: else seams show
          <rect key={n} x={(n * WIDTH) / STRIPES} y={1} width={n === STRIPES - 1 ? WIDTH / STRIPES : (1.5 * WIDTH) / STRIPES} height={11} fill={colour(n / (STRIPES - 1))} />
        ))}
        {marks.map(({ at, text }) => (
          <text key={at} x={at * WIDTH} y={24} text-anchor="middle">
            {text}
          </text>
        ))}
      </svg>
    </div>
  );
}
