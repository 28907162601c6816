// The frame of a picture: its title, what it shows, and how to save it.

import type { ComponentChildren } from "preact";
import { useRef } from "preact/hooks";
import { Python } from "./python";
import { savePng, saveSvg } from "./save";
import "./figure.css";

interface Props {
  title: string;
  /** What it shows, with units. */
  note?: ComponentChildren;
  /** Name of a saved file. */
  name: string;
  python?: string;
  /** Further controls beside the title. */
  tools?: ComponentChildren;
  children: ComponentChildren;
}

/** A picture (an svg or a canvas among the children) with a title, buttons that save it, and its Python call. */
export function Figure({ title, note, name, python, tools, children }: Props) {
  const body = useRef<HTMLDivElement>(null);
  const svg = () => body.current?.querySelector<SVGSVGElement>("svg.picture") ?? null;
  const canvas = () => body.current?.querySelector("canvas") ?? null;
  return (
    <figure class="figure">
      <figcaption>
        <h2>{title}</h2>
        {note && <span class="quiet">{note}</span>}
        <span class="figure-tools">
          {tools}
          <button
            type="button"
            class="small"
            onClick={() => {
              const found = svg() ?? canvas();
              if (found) void savePng(name, found);
            }}
          >
            PNG
          </button>
          <button
            type="button"
            class="small"
            onClick={() => {
              const found = svg() ?? canvas();
              if (found) saveSvg(name, found);
            }}
          >
            SVG
          </button>
        </span>
      </figcaption>
      <div ref={body} class="figure-body">
        {children}
      </div>
      {python && <Python code={python} />}
    </figure>
  );
}
