//! The values in messages between ranks. Records are arrays without field names: both ends run the
//! same build of kvx, which their first message checks.

use std::sync::Arc;
use std::time::Duration;

use super::{MAX_ASKED, step::MAX_STEP};
use crate::engine::{
    Address, BlockLists, BlockReference, ClockOffset, EngineId, FailedLoad, Fresh, Heartbeat, Kept,
    RemoteEngine, RequestId, SendOrder, Time, Transferred, Unsaved, WorkerRank,
};
use crate::msgpack::{MsgpackReader, MsgpackValue, MsgpackWriter, Result};
use crate::wire::PushGrant;

/// The most loads, leases, failures and heartbeats in a message.
const MAX_ORDERS: usize = 1 << 16;
/// The most names in a list.
const MAX_NAMES: usize = 1 << 20;
/// The most KV cache groups.
pub(super) const MAX_GROUPS: usize = 1 << 10;

/// A value that both ends read and write in the same form.
pub(super) trait GroupValue: MsgpackValue + Sized {
    /// The most values in a list.
    const MOST: usize = MAX_ORDERS;

    /// Reads the value.
    fn read(reader: &mut MsgpackReader<'_>) -> Result<Self>;
}

/// Reads the head of a record: an array of exactly `items` items.
pub(super) fn record(reader: &mut MsgpackReader<'_>, items: usize) -> Result<()> {
    match reader.array(items)? {
        len if len == items => Ok(()),
        len => Err(reader.malformed(format_args!("expected {items} items, found {len}"))),
    }
}

/// Makes a type a record of these fields, in this order. Fields after `;` are not sent; the reader
/// sets them.
macro_rules! group_record {
    (
        $Type:ident: $($field:ident)* $(; $unsent:ident = $value:expr)?
        $(, at most $most:expr)?
    ) => {
        impl $crate::msgpack::MsgpackValue for $Type {
            fn write_to(&self, writer: &mut $crate::msgpack::MsgpackWriter) {
                writer.array([$(stringify!($field)),*].len());
                $(self.$field.write_to(writer);)*
            }
        }

        impl $crate::group::value::GroupValue for $Type {
            $(const MOST: usize = $most;)?

            fn read(
                reader: &mut $crate::msgpack::MsgpackReader<'_>,
            ) -> $crate::msgpack::Result<Self> {
                $crate::group::value::record(reader, [$(stringify!($field)),*].len())?;
                Ok($Type {
                    $($field: $crate::group::value::GroupValue::read(reader)?,)*
                    $($unsent: $value,)?
                })
            }
        }
    };
}

pub(super) use group_record;

group_record!(Address: host port);
group_record!(BlockReference: pool stamp);
group_record!(FailedLoad: request failure invalid);
group_record!(Fresh: group block pool generation, at most MAX_ASKED);
group_record!(Heartbeat: peer requests);
group_record!(RemoteEngine: engine address tp_size pp_size dcp_size registration);
group_record!(SendOrder: request expires push);
group_record!(Transferred: time post bytes descriptors, at most MAX_NAMES);
group_record!(Unsaved: group block place, at most MAX_ASKED);
group_record!(WorkerRank: pp tp);

/// Defines how a type is written and read.
macro_rules! value {
    ($Type:ty $(; at most $most:expr)?, |$value:ident, $writer:ident| $write:expr, $read:expr) => {
        impl MsgpackValue for $Type {
            fn write_to(&self, $writer: &mut MsgpackWriter) {
                let $value = self;
                $write;
            }
        }

        value!($Type $(; at most $most)?, $read);
    };
    ($Type:ty $(; at most $most:expr)?, $read:expr) => {
        impl GroupValue for $Type {
            $(const MOST: usize = $most;)?

            fn read(reader: &mut MsgpackReader<'_>) -> Result<Self> {
                $read(reader)
            }
        }
    };
}

value!(bool, |reader: &mut MsgpackReader<'_>| match reader.unsigned()? {
    0 => Ok(false),
    1 => Ok(true),
    other => Err(reader.malformed(format_args!("{other} is not a flag (0 or 1)"))),
});
// A port.
value!(u16, MsgpackReader::port);
value!(u32; at most MAX_STEP, MsgpackReader::unsigned_32);
value!(u64, MsgpackReader::unsigned);
value!(f64, |seconds, writer| writer.float(*seconds), |reader: &mut MsgpackReader<'_>| {
    match reader.float()? {
        number if number.is_finite() => Ok(number),
        number => Err(reader.malformed(format_args!("{number} is not a number of seconds"))),
    }
});
value!(
    Duration,
    |duration, writer| writer.unsigned(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)),
    |reader: &mut MsgpackReader<'_>| reader.unsigned().map(Duration::from_nanos)
);
value!(Time, |time, writer| time.since(Time::default()).write_to(writer), |reader| Duration::read(
    reader
)
.map(Time::from_origin));
value!(Arc<str>, |text, writer| writer.text(text), |reader: &mut MsgpackReader<'_>| reader
    .text()
    .map(Arc::from));
value!(
    RequestId; at most MAX_NAMES,
    |request, writer| writer.text(request.as_str()),
    |reader: &mut MsgpackReader<'_>| reader.text().map(RequestId::from)
);
value!(EngineId, |engine, writer| writer.text(engine.as_str()), |reader: &mut MsgpackReader<
    '_,
>| reader
    .text()
    .map(EngineId::from));
value!(
    BlockLists,
    |lists, writer| writer.list(lists.groups(), |writer, list| {
        writer.list(list, |writer, block| block.write_to(writer));
    }),
    |reader: &mut MsgpackReader<'_>| reader.list(MAX_GROUPS, Vec::<u32>::read).map(BlockLists::new)
);
value!(Kept, |kept, writer| (*kept == Kept::Request).write_to(writer), |reader| Ok(
    if bool::read(reader)? { Kept::Request } else { Kept::Load }
));
// The clock of a peer.
value!(
    (EngineId, ClockOffset),
    |clock, writer| {
        writer.array(3);
        clock.0.write_to(writer);
        clock.1.seconds.write_to(writer);
        clock.1.round_trip.write_to(writer);
    },
    |reader: &mut MsgpackReader<'_>| {
        record(reader, 3)?;
        let (engine, seconds) = (EngineId::read(reader)?, f64::read(reader)?);
        Ok((engine, ClockOffset { seconds, round_trip: Duration::read(reader)? }))
    }
);
value!(Arc<RemoteEngine>, |engine, writer| RemoteEngine::write_to(engine, writer), |reader| {
    RemoteEngine::read(reader).map(Arc::new)
});
value!(PushGrant; at most PushGrant::MAX, PushGrant::read);

impl<T: GroupValue> GroupValue for Option<T> {
    fn read(reader: &mut MsgpackReader<'_>) -> Result<Self> {
        reader.optional(T::read)
    }
}

impl<T: GroupValue> GroupValue for Vec<T> {
    fn read(reader: &mut MsgpackReader<'_>) -> Result<Self> {
        reader.list(T::MOST, T::read)
    }
}

impl<A: GroupValue, B: GroupValue> GroupValue for (A, B) {
    fn read(reader: &mut MsgpackReader<'_>) -> Result<Self> {
        reader.pair(A::read, B::read)
    }
}
