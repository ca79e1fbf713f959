// What every page has to say beside its content: notices of the server behind one button of the bar on top, so that they
// never move the page, and banners where nothing else can be done.
import { Popover } from "radix-ui";
import { useEffect, useRef, type ReactNode } from "react";
import { Link, useLocation } from "react-router";
import { useLive } from "../live/hooks";
import { count } from "../lib/format";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { Icon } from "../ui/icons";
import { Problem } from "../ui/problem";

/** The page on which identity conflicts are decided: a notice there would only repeat it. */
const CONFLICTS = "/app/nodes";

/** The page that shows the parts of the system and the notices about them. */
const HEALTH = "/app/health";
const OF_THE_SYSTEM: ReadonlySet<string> = new Set(["database-unreachable", "no-controller", "nats-unreachable", "no-tasks", "redis-unreachable"]);
const OUTDATED: BannerProps & { id: string } = { id: "outdated", level: "info", text: "A new version of this page is available.", hint: "Reloading discards unsaved input." };
/** The worst first. */
const LEVELS = ["error", "warning", "info"] as const;
const IDENTITY_CONFLICTS = "identity-conflicts";

/** Errors, identity conflicts and a newer page say their text; configuration warnings are an icon with their number. */
export function Notices(): ReactNode {
  const notices = useLive((state) => state.notices);
  const outdated = useLive((state) => state.outdated);
  const place = useLocation().pathname;
  useNoticeAnnouncements(notices);
  const shown: (typeof OUTDATED)[] = [...notices.filter((notice) => notice.id !== IDENTITY_CONFLICTS || place !== CONFLICTS), ...(outdated ? [OUTDATED] : [])];
  const level = LEVELS.find((candidate) => shown.some((notice) => notice.level === candidate));
  if (level === undefined) return null;
  const worst = shown.find((notice) => notice.level === level && (level !== "warning" || notice.id === IDENTITY_CONFLICTS));
  const all = count(shown.length, "notice");
  return (
    <Popover.Root>
      <Popover.Trigger asChild>
        <Button kind="ghost" small className={`notices ${level}`}>
          <Icon name={level === "error" ? "error" : "warning"} />
          {worst !== undefined && <span className="name">{worst.text}</span>}
          {shown.length > 1 && <span aria-hidden="true">{shown.length}</span>}
          {" "}
          <span className="visually-hidden">{all}</span>
        </Button>
      </Popover.Trigger>
      <Popover.Portal>
        <Popover.Content className="menu notice-list" align="end" sideOffset={4} collisionPadding={8} aria-label={all}>
          {shown.map((notice) => (
            <Banner key={notice.id} {...notice}>
              {notice.id === IDENTITY_CONFLICTS && <Link to={`${CONFLICTS}#conflicts`}>Decide</Link>}
              {OF_THE_SYSTEM.has(notice.id) && place !== HEALTH && <Link to={HEALTH}>System health</Link>}
              {notice.id === OUTDATED.id && (
                <Button small onClick={() => window.location.reload()}>
                  Reload
                </Button>
              )}
            </Banner>
          ))}
        </Popover.Content>
      </Popover.Portal>
    </Popover.Root>
  );
}

interface BannersProps {
  failure: Error | null;
  onRetry: () => void;
}

export function Banners({ failure, onRetry }: BannersProps): ReactNode {
  const forbidden = useLive((state) => state.connection === "forbidden");
  if (!forbidden && failure === null) return null;
  return (
    <section className="banners" aria-label="Notices">
      <Problem error={failure} />
      {forbidden && (
        <Banner level="error" text="This account no longer has access to the cluster." hint="Ask an administrator for access, or sign in with another account.">
          <Button small onClick={onRetry}>
            Try again
          </Button>
        </Banner>
      )}
    </section>
  );
}

interface BannerProps {
  level: "info" | "warning" | "error";
  text: string;
  hint: string;
  children?: ReactNode;
}

export function Banner({ level, text, hint, children }: BannerProps): ReactNode {
  return (
    <div className={`banner ${level}`}>
      <Icon name={level === "error" ? "error" : "warning"} />
      <p className="grow">
        <strong>{text}</strong>
        {hint !== "" && <> {hint}</>}
      </p>
      {children}
    </div>
  );
}

/** Says a notice when it comes; those that were there at first are read with the page. */
function useNoticeAnnouncements(notices: readonly { id: string; text: string }[]): void {
  const shownNotices = useRef<Set<string> | null>(null);
  useEffect(() => {
    const previous = shownNotices.current;
    shownNotices.current = new Set(notices.map((notice) => notice.id));
    if (previous === null) return;
    for (const notice of notices) if (!previous.has(notice.id)) announce(notice.text);
  }, [notices]);
}
