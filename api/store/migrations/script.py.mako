"""${message}."""

from alembic import op
import sqlalchemy as sa
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    """Makes it so."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Undoes it."""
    ${downgrades if downgrades else "pass"}
