// The frame of a picture: its title, what it shows, and how to save it.

import type { ComponentChildren, RefObject } from "preact";
import { useRef } from "preact/hooks";
import { Python } from "./python";
import { savePng, saveSvg } from "./save";
import { shownName } from "./text";
import "./figure.css";

interface Props {
  title: string;
  /** What it shows, with units. */
  note?: ComponentChildren;
  /** Name of a saved file. */
  name: string;
  /** The Python call that gives the same; several for what has parts. */
  python?: string | undefined | (string | undefined)[];
  /** Further controls beside the title. */
  tools?: ComponentChildren;
  children: ComponentChildren;
}

/** Buttons that save the picture (an svg or a canvas) in an element. */
export function SaveButtons({ of, name }: { of: RefObject<HTMLElement | null>; name: string }) {
  const picture = () => of.current?.querySelector<SVGSVGElement>("svg.picture") ?? of.current?.querySelector("canvas") ?? null;
  const button = (kind: string, save: (name: string, picture: SVGSVGElement | HTMLCanvasElement) => unknown) => (
    <button
      type="button"
      class="small"
      aria-label={`save ${shownName(name, 60)} as ${kind}`}
      onClick={() => {
        const found = picture();
        if (found) void save(name, found);
      }}
    >
      {kind}
    </button>
  );
  return (
    <>
      {button("PNG", savePng)}
      {button("SVG", saveSvg)}
    </>
  );
}

/** A picture (an svg or a canvas among the children) with a title, buttons that save it, and its Python call. */
export function Figure({ title, note, name, python, tools, children }: Props) {
  const body = useRef<HTMLDivElement>(null);
  return (
    <figure class="figure">
      <figcaption>
        <h2>{title}</h2>
        {note && <span class="quiet">{note}</span>}
        <span class="figure-tools">
          {tools}
          <SaveButtons of={body} name={name} />
        </span>
      </figcaption>
      <div ref={body} class="figure-body">
        {children}
      </div>
      {[python].flat().map((code, n) => (
        <Python key={n} code={code} />
      ))}
    </figure>
  );
}
